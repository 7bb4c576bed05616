"""x W^T + b for which a row's bits do not depend on how many rows there are.

K is cut into splits whose length follows from the weight's shape alone. Products of a split are summed in steps of
BLOCK_K, then the splits from left to right, in float32:

    K = 3 splits    few rows     a program per split, to fill the device; a second kernel sums its partial results
                    many rows    one program goes through all three, keeping a split's sum apart from the total

Both are ((s0 + s1) + s2) + b. Tiles may differ in rows and columns, for which sums don't care, but never in BLOCK_K.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specpaged_kernels.jit import TYPES, Variant, kernel
from specpaged_kernels.limits import DTYPES

MAX_SPLIT_ROWS = 64  # rows up to which the splits of K are programs of their own


@dataclass(frozen=True)
class Tiles:
    """What a variant of the kernel is compiled for."""

    block_m: int
    block_n: int
    block_k: int
    split_len: int  # a multiple of block_k
    num_warps: int
    num_stages: int


def choose_tiles(num_rows: int, out_features: int, in_features: int, dtype: torch.dtype) -> Tiles:
    """Only block_m and num_warps depend on the rows. 64 rows a tile even for one: one class of MMA instruction."""
    block_k = 128 // dtype.itemsize
    block_n = 64
    # About two programs per multiprocessor of a large device.
    splits = max(1, min(in_features // (8 * block_k), 264 // triton.cdiv(out_features, block_n)))
    split_len = triton.cdiv(triton.cdiv(in_features, splits), block_k) * block_k
    many = num_rows > MAX_SPLIT_ROWS
    return Tiles(128 if many else 64, block_n, block_k, split_len, 8 if many else 4, 3 if dtype.itemsize > 2 else 4)


@triton.jit
def product(
    x, weight, rows, columns, num_rows, out_features, in_features, begin_split, end_split, split_len,
    stride_x, stride_weight, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, BLOCK_N] float32: x[rows] weight[columns]^T over some splits of K, each summed by itself."""
    in_rows = (rows < num_rows)[:, None]
    in_columns = (columns < out_features)[None, :]
    steps = tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for split in range(begin_split, end_split):
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(split * split_len, tl.minimum((split + 1) * split_len, in_features), BLOCK_K):
            k = start + steps
            in_k = k < in_features
            x_tile = tl.load(x + rows[:, None] * stride_x + k[None, :], mask=in_rows & in_k[None, :], other=0.0)
            weight_ptrs = weight + columns[None, :] * stride_weight + k[:, None]
            weight_tile = tl.load(weight_ptrs, mask=in_columns & in_k[:, None], other=0.0)
            acc = tl.dot(x_tile, weight_tile, acc, input_precision="ieee")
        total += acc
    return total


@kernel(
    "x", "weight", "output", "partial", "in_features", "out_features", "split_len",
    "stride_x", "stride_weight", "stride_output",
)  # fmt: skip
def _linear_kernel(
    x, weight, bias, output, partial,
    num_rows, out_features, in_features, split_len, stride_x, stride_weight, stride_output,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    APART: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    # Neighbouring programs share the weight's tile: it is read once from memory.
    num_row_tiles = tl.cdiv(num_rows, BLOCK_M)
    rows = (tl.program_id(0) % num_row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = (tl.program_id(0) // num_row_tiles * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    in_rows = rows < num_rows
    in_columns = columns < out_features
    begin_split, end_split = 0, tl.cdiv(in_features, split_len)
    if APART:
        begin_split = tl.program_id(1)
        end_split = begin_split + 1
    total = product(
        x, weight, rows, columns, num_rows, out_features, in_features, begin_split, end_split, split_len,
        stride_x, stride_weight, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    stored = in_rows[:, None] & in_columns[None, :]
    if APART:
        partial += tl.program_id(1).to(tl.int64) * num_rows * out_features
        tl.store(partial + rows[:, None] * out_features + columns[None, :], total, mask=stored)
    else:
        if HAS_BIAS:
            total += tl.load(bias + columns, mask=in_columns, other=0.0).to(tl.float32)[None, :]
        output_ptrs = output + rows[:, None] * stride_output + columns[None, :]
        tl.store(output_ptrs, total.to(output.dtype.element_ty), mask=stored)


@kernel("partial", "bias", "output", "out_features", "stride_output")
def _merge_kernel(
    partial, bias, output, num_rows, out_features, num_splits, stride_output,
    BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < out_features
    total = tl.zeros([BLOCK], tl.float32)
    pointers = partial + row * out_features + columns
    for _ in range(num_splits):
        total += tl.load(pointers, mask=mask, other=0.0)
        pointers += num_rows * out_features
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(output + row * stride_output + columns, total.to(output.dtype.element_ty), mask=mask)


def _linear_constants(tiles: Tiles, apart: bool, has_bias: bool) -> dict[str, Any]:
    return {
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "APART": apart,
        "HAS_BIAS": has_bias,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        "enable_fp_fusion": False,
    }


def _merge_constants(has_bias: bool) -> dict[str, Any]:
    return {"BLOCK": 1024, "HAS_BIAS": has_bias, "num_warps": 4, "enable_fp_fusion": False}


def variants() -> Iterator[Variant]:
    """All that `linear` launches."""
    for dtype in DTYPES:
        types = {name: f"*{TYPES[dtype]}" for name in ("x", "weight", "bias", "output", "partial")}
        few, many = (choose_tiles(rows, 4096, 4096, dtype) for rows in (1, MAX_SPLIT_ROWS + 1))
        yield Variant(_linear_kernel, types | {"partial": "*fp32"}, _linear_constants(few, True, False))
        for has_bias in (False, True):
            for tiles in (few, many):
                yield Variant(_linear_kernel, types, _linear_constants(tiles, False, has_bias))
            of_merge = {name: types[name] for name in ("bias", "output")} | {"partial": "*fp32"}
            yield Variant(_merge_kernel, of_merge, _merge_constants(has_bias))


def linear(
    x: Tensor,  # [M, K] dtype
    weight: Tensor,  # [N, K] dtype
    bias: Tensor | None = None,  # [N] dtype
    tiles: Tiles | None = None,  # default: choose_tiles
) -> Tensor:  # [M, N] dtype
    """What `linear_ref` says. K is contiguous in x and weight; nothing waits for the device."""
    num_rows, in_features = x.shape
    out_features = weight.shape[0]
    tiles = tiles or choose_tiles(num_rows, out_features, in_features, x.dtype)
    num_splits = triton.cdiv(in_features, tiles.split_len)
    output = torch.empty(num_rows, out_features, dtype=x.dtype, device=x.device)
    apart = num_splits > 1 and num_rows <= MAX_SPLIT_ROWS
    partial = output
    if apart:
        partial = torch.empty(num_splits, num_rows, out_features, dtype=torch.float32, device=x.device)
    has_bias = bias is not None
    bias = output if bias is None else bias  # never read then
    num_tiles = triton.cdiv(num_rows, tiles.block_m) * triton.cdiv(out_features, tiles.block_n)
    _linear_kernel[(num_tiles, num_splits if apart else 1)](
        x, weight, bias, output, partial,
        num_rows, out_features, in_features, tiles.split_len, x.stride(0), weight.stride(0), output.stride(0),
        **_linear_constants(tiles, apart, has_bias and not apart),
    )  # fmt: skip
    if apart:
        _merge_kernel[(num_rows, triton.cdiv(out_features, 1024))](
            partial, bias, output, num_rows, out_features, num_splits, output.stride(0),
            **_merge_constants(has_bias),
        )  # fmt: skip
    return output


def linear_ref(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b in float64, rounded once."""
    result = x.double() @ weight.double().T
    if bias is not None:
        result = result + bias.double()
    return result.to(x.dtype)
