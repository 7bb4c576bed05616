"""Which kernels run a model's passes: chosen once, when the model is loaded."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specpaged.batch import RaggedBatch
from specpaged.config import ATTENTION_BACKENDS, check_choice
from specpaged.modeling.attention import PagedPass
from specpaged.modeling.attention_torch import TorchPass
from specpaged_kernels import limits

if TYPE_CHECKING:
    from specpaged.modeling.loaded_model import LoadedModel

ENVIRONMENT = "SPECPAGED_ATTENTION_BACKEND"  # overrides the argument


def choose_backend(
    attention_backend: str,
    device: torch.device,
    dtype: torch.dtype,
    geometries: Collection[tuple[int, int, int]],  # (Hq, Hkv, D) of the layers
    block_size: int,
    vocab_size: int,
    numerics: str,
) -> tuple[str, str | None]:
    """The backend, and what kept "auto" from Triton's kernels, which it takes on a GPU.

    Raises:
        ValueError: the backend that the argument or the environment names is unknown, or cannot run this model here.
    """
    name, wanted = "attention_backend", attention_backend
    if ENVIRONMENT in os.environ:
        name, wanted = ENVIRONMENT, os.environ[ENVIRONMENT]
    check_choice(name, wanted, ATTENTION_BACKENDS)
    if wanted == "torch" or (wanted == "auto" and device.type != "cuda"):
        return "torch", None
    if wanted == "xformers":
        from specpaged.modeling import attention_xformers

        reason = attention_xformers.why_not(device, dtype, geometries, block_size, numerics)
    else:
        reason = limits.why_not(device, dtype, geometries, block_size, vocab_size)
    if reason is None:
        return ("triton" if wanted == "auto" else wanted), None
    if wanted == "auto":
        return "torch", reason
    raise ValueError(f"{name}={wanted!r} cannot be used: {reason}; allowed: 'torch', or 'auto'")


def new_pass(model: LoadedModel, batch: RaggedBatch, num_rows: int, kv_layers: Sequence[Tensor]) -> PagedPass:
    """The pass of a batch by the model's backend."""
    # Kernels are not imported before they are wanted: that takes seconds.
    if model.backend == "triton":
        from specpaged.modeling.attention_triton import TritonPass

        return TritonPass(batch, num_rows, kv_layers)
    if model.backend == "xformers":
        from specpaged.modeling.attention_xformers import XformersPass

        return XformersPass(batch, num_rows, kv_layers, model.attention_scheme, model.dtype)
    return TorchPass(batch, num_rows, kv_layers, model.attention_scheme, model.dtype)
