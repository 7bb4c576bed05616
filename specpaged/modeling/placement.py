"""The device that kernels are launched on."""

from __future__ import annotations

import contextlib

import torch


def on(device: torch.device) -> contextlib.AbstractContextManager:
    """Meanwhile `device` is the current one, on which Triton launches kernels, wherever their tensors lie."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
