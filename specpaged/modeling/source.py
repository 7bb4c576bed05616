"""A model that has been opened and checked, before its layers get the form in which they compute."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from specpaged.modeling.exact import ExactLinears
from specpaged.modeling.families import LayerGeometry


class Source(Protocol):
    """Where a decoder comes from.

    A decoder is a module that is called as decoder(token_ids, positions, paged_pass, logits_idx) with token_ids and
    positions [N] int64 and logits_idx [M] int64 (None: all rows), and returns logits [M, V].
    """

    implementation: str  # "flat" | "transformers"
    architecture: str
    dtype: torch.dtype
    layers: list[LayerGeometry]
    vocab_size: int  # rows of the output layer
    num_parameters: int

    def exact(self, linears: ExactLinears) -> tuple[nn.Module, set[int]]:
        """The decoder with its matrix products by `linears`, and the last dimensions that element-wise functions see.

        Raises InexactError. May be called once, as `fast` may.
        """
        ...

    def fast(self, backend: str) -> nn.Module:
        """The decoder with the quickest kernel for each layer and row count."""
        ...
