"""A model that has been opened and checked, before its layers get the form in which they compute; and that form."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from specpaged.modeling.attention.base import PagedPass
from specpaged.modeling.exact import ExactLinears
from specpaged.modeling.families import LayerGeometry
from specpaged.modeling.forward_output import ForwardOutput, ForwardRequest


class Decoder(Protocol):
    """A whole model on packed rows: an nn.Module whose `forward` is this.

    One with an attribute `has_argmax` that is true takes requests with `argmax_of`. One that may not be able to tell
    hidden states has a method `check_shows_layers`, which raises ValueError then.
    """

    def forward(
        self,
        token_ids: Tensor,  # [N] int64
        positions: Tensor,  # [N] int64
        paged_pass: PagedPass,
        request: ForwardRequest,
    ) -> ForwardOutput:
        """Writes the KV of N rows, and computes what the request asks for; logits in the model's dtype."""
        ...


class Source(Protocol):
    """Where a decoder comes from."""

    implementation: str  # "flat" | "transformers"
    architecture: str
    dtype: torch.dtype
    layers: list[LayerGeometry]
    vocab_size: int  # rows of the output layer
    num_parameters: int

    def exact(self, linears: ExactLinears) -> tuple[nn.Module, set[int]]:
        """A Decoder with its matrix products by `linears`, and the last dimensions that element-wise functions see.

        Raises InexactError. May be called once, as `fast` may.
        """
        ...

    def fast(self, backend: str) -> nn.Module:
        """A Decoder with the quickest kernel for each layer and row count."""
        ...
