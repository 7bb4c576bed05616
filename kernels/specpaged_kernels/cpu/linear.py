"""Exact linear layers on a CPU: see linear.cpp."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from specpaged_kernels.cpu.library import INT, POINTER, SIZE, check_status, check_tensor, functions

PANEL = 16  # outputs; as in the C++ file
ARGUMENTS = (POINTER, SIZE, SIZE, POINTER, POINTER, SIZE, SIZE, POINTER, INT)


@functools.cache
def _functions() -> dict:
    return functions("linear", ARGUMENTS, INT)


def pack(weight: Tensor) -> Tensor:
    """[N, K] -> [ceil(N / PANEL), K, PANEL], contiguous: outputs side by side, zeros behind N."""
    weight = F.pad(weight, (0, 0, 0, -len(weight) % PANEL))
    return weight.view(-1, PANEL, weight.shape[1]).transpose(1, 2).contiguous()


def linear(
    x: Tensor,  # [M, K] dtype
    packed: Tensor,  # of `pack`, dtype
    bias: Tensor | None,  # [N] dtype
    out_features: int,  # N
) -> Tensor:  # [M, N] dtype
    """x times the weight's transpose, plus the bias: summed over K in order in float32, rounded once."""
    num_rows, in_features = x.shape
    check_tensor("x", x, x.shape, packed.dtype, contiguous=False)
    check_tensor("packed", packed, (-(-out_features // PANEL), in_features, PANEL), packed.dtype)
    check_tensor("bias", bias, (out_features,), packed.dtype)
    if x.stride(1) != 1:
        x = x.contiguous()
    y = torch.empty(num_rows, out_features, dtype=x.dtype)
    status = _functions()[x.dtype](
        x.data_ptr(), x.stride(0), num_rows, packed.data_ptr(), None if bias is None else bias.data_ptr(),
        in_features, out_features, y.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    check_status(status)
    return y
