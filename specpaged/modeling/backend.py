"""Which kernels run a model's passes: chosen once, when the model is loaded."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Collection

import torch

from specpaged.checks import check_choice
from specpaged.config import ATTENTION_BACKENDS
from specpaged_kernels import limits
from specpaged_kernels.cpu import library

ENVIRONMENT = "SPECPAGED_ATTENTION_BACKEND"  # what "auto" is, if it is set

logger = logging.getLogger("specpaged")


def choose_backend(
    attention_backend: str,
    device: torch.device,
    dtype: torch.dtype,
    geometries: Collection[tuple[int, int, int]],  # (Hq, Hkv, D) of the layers
    block_size: int,
    vocab_size: int,
    numerics: str,
) -> tuple[str, str | None]:
    """The backend, and what kept "auto" from our own kernels: Triton's on a GPU, C++ on a CPU.

    Raises:
        ValueError: the backend that the argument or the environment names is unknown, or cannot run this model here.
    """
    name, wanted = "attention_backend", attention_backend
    if wanted == "auto" and ENVIRONMENT in os.environ:
        name, wanted = ENVIRONMENT, os.environ[ENVIRONMENT]
    check_choice(name, wanted, ATTENTION_BACKENDS)
    if wanted == "torch":
        return "torch", None
    backend = wanted if wanted != "auto" else "triton" if device.type == "cuda" else "cpp"
    if backend == "xformers":
        from specpaged.modeling.attention import xformers_pass

        reason = xformers_pass.why_not(device, dtype, geometries, block_size, numerics)
    elif backend == "cpp":
        reason = f"device {str(device)!r} is no CPU" if device.type != "cpu" else library.why_not(dtype)
    else:
        reason = limits.why_not(device, dtype, geometries, block_size, vocab_size)
    if reason is None:
        return backend, None
    if wanted == "auto":
        _warn_of_torch(reason)
        return "torch", reason
    raise ValueError(f"{name}={wanted!r} cannot be used: {reason}; allowed: 'torch', or 'auto'")


@functools.cache
def _warn_of_torch(reason: str) -> None:
    """Once: a target and a draft have the same reason."""
    logger.warning("passes run on torch's kernels, which are several times slower than ours: %s", reason)
