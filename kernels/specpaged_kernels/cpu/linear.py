"""Exact linear layers on a CPU: see linear.cpp."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from specpaged_kernels.cpu.build import load
from specpaged_kernels.cpu.library import INT, POINTER, SIZE, SOURCE, STORAGE, check_status, check_tensor, functions

PANEL = 16  # outputs; as in the C++ file
ARGUMENTS = (POINTER, SIZE, SIZE, POINTER, SIZE, POINTER, SIZE, SIZE, POINTER, INT)


@functools.cache
def _functions() -> dict:
    return functions("linear", ARGUMENTS, INT)


def stored_dtype(weight: Tensor) -> torch.dtype:
    """The narrowest dtype that holds each value of a float32 weight as it is, and costs a pass nothing to convert.

    That is 16 bits wide for what a float16 or bfloat16 checkpoint has become in float32. Other weights keep theirs.
    """
    if weight.dtype == torch.float32:
        for dtype in (torch.bfloat16, torch.float16):
            if (dtype != torch.float16 or load(SOURCE).converts_float16()) and torch.equal(weight.to(dtype), weight):
                return dtype
    return weight.dtype


def pack(weight: Tensor) -> Tensor:
    """[N, K] -> [ceil(N / PANEL), K, PANEL], contiguous: outputs side by side, zeros behind N, of `stored_dtype`.

    Of bfloat16, a panel's halves alternate: see linear.cpp.
    """
    weight = F.pad(weight.to(stored_dtype(weight)), (0, 0, 0, -len(weight) % PANEL))
    panels = weight.view(len(weight) // PANEL, PANEL, weight.shape[1]).transpose(1, 2)
    if weight.dtype == torch.bfloat16:
        panels = panels.unflatten(2, (2, PANEL // 2)).transpose(2, 3).flatten(2)
    return panels.contiguous()


def linear(
    x: Tensor,  # [M, K] dtype
    packed: Tensor,  # of `pack`: dtype, or narrower where that is float32
    bias: Tensor | None,  # [N] dtype
    out_features: int,  # N
) -> Tensor:  # [M, N] dtype
    """x times the weight's transpose, plus the bias: summed over K in order in float32, rounded once."""
    num_rows, in_features = x.shape
    stored = packed.dtype if x.dtype == torch.float32 and packed.dtype in STORAGE else x.dtype
    check_tensor("x", x, x.shape, x.dtype, contiguous=False)
    check_tensor("packed", packed, (-(-out_features // PANEL), in_features, PANEL), stored)
    check_tensor("bias", bias, (out_features,), x.dtype)
    if x.stride(1) != 1:
        x = x.contiguous()
    y = torch.empty(num_rows, out_features, dtype=x.dtype)
    status = _functions()[x.dtype](
        x.data_ptr(), x.stride(0), num_rows, packed.data_ptr(), STORAGE[stored],
        None if bias is None else bias.data_ptr(), in_features, out_features, y.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    check_status(status)
    return y
