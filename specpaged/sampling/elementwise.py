"""exp, log and log-sum-exp in fp32 that give the same bits for an element wherever it stands.

A library's vectorised exp or log and its scalar tail, its CPU and its GPU version may differ in the last bit,
and a floating-point sum depends on how a kernel splits it. Here exp and log are made of single torch operations
that IEEE 754 rounds correctly (add, multiply, divide; never fused, as each is a kernel of its own), and sums run
over integers, where order cannot matter. So a row's result depends on that row alone, on any device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4  # the high part times an exponent is exact in fp32
_EXP_COEFFICIENTS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1)
_SQRT_HALF_BITS = 0x3F3504F3
_WEIGHT_SCALE = 2.0**40  # int64 holds a sum of 2^22 weights


def exp_fp32(x: Tensor) -> Tensor:
    """e^x for x <= 0, fp32, within 2e-7 relative; exactly 0 below -87 and 1 at 0 (Cephes' expf)."""
    zero = ~(x >= -87.0)
    r = x.clamp(-87.0, 0.0)
    exponent = (r * math.log2(math.e)).round_()
    r = r - exponent * _LN2_HIGH
    r -= exponent * _LN2_LOW
    y = r * _EXP_COEFFICIENTS[0]
    for coefficient in _EXP_COEFFICIENTS[1:]:
        y = y.add_(coefficient).mul_(r)
    y = y.add_(0.5).mul_(r).mul_(r).add_(r).add_(1.0)
    bits = y.view(torch.int32)
    bits += exponent.to(torch.int32) << 23
    return y.masked_fill_(zero, 0.0)


def log_fp32_(x: Tensor) -> Tensor:
    """ln x in place for normal x > 0, fp32, within 3e-7 relative (and near 1 too); contiguous.

    x = 2^k m with m in [sqrt 1/2, sqrt 2), and ln m = 2 artanh(s) with s = (m - 1) / (m + 1).
    """
    bits = x.view(torch.int32)
    k = (bits - _SQRT_HALF_BITS) >> 23
    bits -= k << 23
    f = x - 1.0
    s = f.div_(x.add_(1.0))
    z = s * s
    series = x.copy_(z).mul_(1 / 9).add_(1 / 7).mul_(z).add_(1 / 5).mul_(z).add_(1 / 3).mul_(z).mul_(s).add_(s)
    return series.mul_(2.0).add_(k.to(torch.float32).mul_(math.log(2)))


def exp_weights(x: Tensor, row_max: Tensor) -> Tensor:
    """[M, V], [M, 1] fp32 -> [M, V] int64: floor(2^40 e^(x - row_max)); entries equal to the maximum weigh 2^40."""
    distance = (x - row_max).masked_fill_(x == row_max, 0.0)
    return exp_fp32(distance).mul_(_WEIGHT_SCALE).to(torch.int64)


def softmax_fp32(x: Tensor) -> Tensor:
    """[M, V] fp32 -> [M, V] fp32: row-wise softmax."""
    row_max = x.amax(dim=-1, keepdim=True)
    weights = exp_weights(x, row_max)
    return (weights.double() / weights.sum(dim=-1, keepdim=True).double()).float()


def log_softmax_fp32(x: Tensor) -> Tensor:
    """[M, V] fp32 -> [M, V] fp32: row-wise log-softmax; a row with NaN is NaN throughout."""
    row_max = x.amax(dim=-1, keepdim=True)
    total = exp_weights(x, row_max).sum(dim=-1, keepdim=True).to(torch.float32).mul_(1 / _WEIGHT_SCALE)
    return (x - row_max).sub_(log_fp32_(total))
