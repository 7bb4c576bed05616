"""The output layer with a running argmax: the most likely token of every row, without its logits in memory.

A program takes some rows through a slice of the vocabulary, BLOCK_N ids at a time, and keeps each row's best so far; a
second kernel takes the best of the slices. Sums are formed as in `linear`, over the splits of K of the same weight, and
rounded to its dtype: a row gets the token that `linear` and an argmax would give it, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specpaged_kernels.jit import TYPES, Variant, kernel
from specpaged_kernels.limits import DTYPES
from specpaged_kernels.linear import Tiles, choose_tiles, linear_ref, product

MAX_SLICES = 512  # of the vocabulary: about four programs per multiprocessor of a large device
MERGED_ROWS = 4  # of one program of the second kernel
NO_ID = tl.constexpr(2147483647)


@kernel("x", "weight", "in_features", "split_len", "stride_x", "stride_weight")
def _lm_head_kernel(
    x, weight, bias, slice_values, slice_ids,
    num_rows, vocab_size, in_features, split_len, num_slices, tiles_per_slice, stride_x, stride_weight,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    # Neighbouring programs share the weight's tiles: they are read once from memory.
    num_row_tiles = tl.cdiv(num_rows, BLOCK_M)
    rows = (tl.program_id(0) % num_row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    vocab_slice = tl.program_id(0) // num_row_tiles
    in_rows = rows < num_rows
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    best_id = tl.full([BLOCK_M], NO_ID, tl.int32)
    any_nan = tl.zeros([BLOCK_M], tl.int32)
    for tile in range(vocab_slice * tiles_per_slice, (vocab_slice + 1) * tiles_per_slice):
        ids = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        in_vocab = ids < vocab_size
        total = product(
            x, weight, rows, ids.to(tl.int64), num_rows, vocab_size, in_features,
            0, tl.cdiv(in_features, split_len), split_len, stride_x, stride_weight, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if HAS_BIAS:
            total += tl.load(bias + ids, mask=in_vocab, other=0.0).to(tl.float32)[None, :]
        logits = total.to(x.dtype.element_ty).to(tl.float32)
        any_nan |= tl.max(((logits != logits) & in_vocab[None, :]).to(tl.int32), 1)
        logits = tl.where(in_vocab[None, :] & (logits == logits), logits, float("-inf"))
        largest = tl.max(logits, 1)
        lowest_id = tl.min(tl.where(logits == largest[:, None], ids[None, :], NO_ID), 1)
        better = largest > best  # of equals, the earlier: it has the lower id
        best = tl.where(better, largest, best)
        best_id = tl.where(better, lowest_id, best_id)
    best = tl.where(any_nan != 0, float("nan"), best)
    tl.store(slice_values + rows * num_slices + vocab_slice, best, mask=in_rows)
    tl.store(slice_ids + rows * num_slices + vocab_slice, best_id, mask=in_rows)


@kernel()
def _merge_kernel(
    slice_values, slice_ids, token_ids, ok, num_rows, num_slices, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr
):
    row = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    slices = tl.arange(0, BLOCK_P)
    pointers = row[:, None] * num_slices + slices[None, :]
    mask = (row < num_rows)[:, None] & (slices < num_slices)[None, :]
    values = tl.load(slice_values + pointers, mask=mask, other=float("-inf"))
    ids = tl.load(slice_ids + pointers, mask=mask, other=NO_ID)
    any_nan = tl.max((values != values).to(tl.int32), 1)
    largest = tl.max(tl.where(values == values, values, float("-inf")), 1)
    token_id = tl.min(tl.where(values == largest[:, None], ids, NO_ID), 1)
    row_ok = (any_nan == 0) & (largest > float("-inf"))
    tl.store(token_ids + row, tl.where(row_ok, token_id, 0).to(tl.int64), mask=row < num_rows)
    tl.store(ok + row, row_ok, mask=row < num_rows)


def _lm_head_constants(tiles: Tiles, has_bias: bool) -> dict[str, Any]:
    return {
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "HAS_BIAS": has_bias,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        "enable_fp_fusion": False,
    }


def _merge_constants() -> dict[str, Any]:
    return {"BLOCK_R": MERGED_ROWS, "BLOCK_P": MAX_SLICES, "num_warps": 4}


def variants() -> Iterator[Variant]:
    """All that `lm_head` launches."""
    slices = {"slice_values": "*fp32", "slice_ids": "*i32"}
    for dtype in DTYPES:
        types = slices | {name: f"*{TYPES[dtype]}" for name in ("x", "weight", "bias")}
        for has_bias in (False, True):
            yield Variant(_lm_head_kernel, types, _lm_head_constants(choose_tiles(1, 4096, 4096, dtype), has_bias))
    yield Variant(_merge_kernel, slices | {"token_ids": "*i64", "ok": "*i1"}, _merge_constants())


def lm_head(
    x: Tensor,  # [M, K] dtype
    weight: Tensor,  # [V, K] dtype
    bias: Tensor | None = None,  # [V] dtype
    tiles: Tiles | None = None,  # default: those of `linear` for one row
) -> tuple[Tensor, Tensor]:  # [M] int64, [M] bool
    """What `lm_head_ref` says; nothing waits for the device. The id of a row that is not ok is 0."""
    num_rows, in_features = x.shape
    vocab_size, device = weight.shape[0], x.device
    tiles = tiles or choose_tiles(1, vocab_size, in_features, x.dtype)
    num_tiles = triton.cdiv(vocab_size, tiles.block_n)
    tiles_per_slice = triton.cdiv(num_tiles, MAX_SLICES)
    num_slices = triton.cdiv(num_tiles, tiles_per_slice)
    values = torch.empty(num_rows, num_slices, dtype=torch.float32, device=device)
    ids = torch.empty(num_rows, num_slices, dtype=torch.int32, device=device)
    _lm_head_kernel[(triton.cdiv(num_rows, tiles.block_m) * num_slices,)](
        x, weight, x if bias is None else bias, values, ids,
        num_rows, vocab_size, in_features, tiles.split_len, num_slices, tiles_per_slice, x.stride(0), weight.stride(0),
        **_lm_head_constants(tiles, bias is not None),
    )  # fmt: skip
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    ok = torch.empty(num_rows, dtype=torch.bool, device=device)
    _merge_kernel[(triton.cdiv(num_rows, MERGED_ROWS),)](
        values, ids, token_ids, ok, num_rows, num_slices, **_merge_constants()
    )
    return token_ids, ok


def lm_head_ref(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The argmax of x W^T + b, rounded to dtype, ties to the lowest id; and whether it is neither NaN nor -inf."""
    values, token_ids = linear_ref(x, weight, bias).float().max(dim=-1)
    ok = values > float("-inf")
    return torch.where(ok, token_ids, 0), ok
