"""Root mean square normalisation of rows, with the residual added on the way if there is one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm_kernel(
    x, residual, weight, output, size, eps, weight_offset, stride_x, stride_residual, stride_output,
    BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    values = tl.load(x + row * stride_x + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        pointers = residual + row * stride_residual + columns
        rounded = (values + tl.load(pointers, mask=mask, other=0.0).to(tl.float32)).to(x.dtype.element_ty)
        tl.store(pointers, rounded, mask=mask)
        values = rounded.to(tl.float32)
    # One program has the whole row: the sum's order is a function of BLOCK alone.
    scale = tl.rsqrt(tl.sum(values * values, 0) / size + eps)
    weights = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32) + weight_offset
    tl.store(output + row * stride_output + columns, (values * scale * weights).to(x.dtype.element_ty), mask=mask)


def rms_norm(
    x: Tensor,  # [N, H] dtype
    weight: Tensor,  # [H] dtype
    eps: float,
    residual: Tensor | None = None,  # [N, H] dtype: becomes x + residual, in place, and is what is normalised
    weight_offset: float = 0.0,  # 1 for models that store weight - 1 (Gemma)
) -> Tensor:  # [N, H] dtype
    """What `rms_norm_ref` says. H is contiguous; nothing waits for the device."""
    num_rows, size = x.shape
    output = torch.empty_like(x)
    _rms_norm_kernel[(num_rows,)](
        x, x if residual is None else residual, weight, output, size, eps, weight_offset,
        x.stride(0), 0 if residual is None else residual.stride(0), output.stride(0),
        BLOCK=triton.next_power_of_2(size), HAS_RESIDUAL=residual is not None, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return output


def rms_norm_ref(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, weight_offset: float = 0.0
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + weight_offset) in float64, rounded once; the residual in x's dtype."""
    if residual is not None:
        residual += x
        x = residual
    values = x.double()
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (values * scale * (weight.double() + weight_offset)).to(x.dtype)
