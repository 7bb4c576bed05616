"""Root mean square normalisation of rows, with the residual added on the way if there is one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from specpaged_kernels.jit import TYPES, Variant, kernel
from specpaged_kernels.limits import DTYPES, MAX_NORM_SIZE

BLOCKS = (128, 1024, 4096, MAX_NORM_SIZE)  # elements of a row, the next of these


@kernel("x", "residual", "weight", "output", "stride_x", "stride_residual", "stride_output")
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


def _block(size: int) -> int:
    for block in BLOCKS:
        if size <= block:
            return block
    raise ValueError(f"x has rows of {size}; allowed: up to {BLOCKS[-1]}")


def _constants(block: int, has_residual: bool) -> dict[str, Any]:
    num_warps = min(16, max(1, block // 512))
    return {"BLOCK": block, "HAS_RESIDUAL": has_residual, "num_warps": num_warps, "enable_fp_fusion": False}


def variants() -> Iterator[Variant]:
    """All that `rms_norm` launches."""
    for dtype in DTYPES:
        types = {name: f"*{TYPES[dtype]}" for name in ("x", "residual", "weight", "output")}
        types |= {"eps": "fp32", "weight_offset": "fp32"}
        for block in BLOCKS:
            for has_residual in (False, True):
                yield Variant(_rms_norm_kernel, types, _constants(block, has_residual))


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
        **_constants(_block(size), residual is not None),
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
