"""Causal attention of a ragged batch over paged KV: prefill, decode and verify rows in one pass.

A sequence's query tokens are cut into blocks of BLOCK_M // G tokens, G = Hq / Hkv heads each; its KV into splits at
fixed absolute positions. A work item is (sequence, split, query block); a program does one for one KV head.

    G = 2, BLOCK_M = 4, split_len = 8: A has 9 tokens of context and runs 3, B has no context and runs 1

        item       0            1            2            3            4           cu_items  0 4 5
        seq        A            A            A            A            B
        split      0            0            1            1            0
        tokens     a0 a1        a2           a0 a1        a2           b0
        reads      0..7         0..7         8..10        8..11        0           of each sequence
        merge      items 0, 2 into a0 a1; items 1, 3 into a2; b0 is written directly

Tiles, splits and the order of merging depend on head_dim, G and dtype alone, and what a row may not read adds exact
zeros to it: a row gets the same bits in a one-token decode, a (K+1)-token verify and any chunk of a prefill.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specpaged_kernels.jit import TYPES, Variant, kernel
from specpaged_kernels.limits import BLOCK_SIZES, DTYPES, HEAD_DIMS, MAX_BLOCK_SIZE, fits, max_group

LOG2_E = tl.constexpr(1.4426950408889634)

NO_WINDOW = 2**30  # positions are fewer
MAX_SPLIT_TOKENS = 16  # query tokens of a sequence up to which its splits are separate work items
MERGED_SPLITS, MERGED_DIMS = 8, 32  # of a sequence's splits, and of the head_dim, that are read at once to merge them


@dataclass(frozen=True)
class Tiles:
    """What a variant of the kernel is compiled for."""

    block_m: int  # query rows of a program: tokens x heads of a group
    block_n: int  # KV positions of a step of its loop
    split_len: int  # KV positions of a program, a multiple of block_n
    num_warps: int
    num_stages: int

    def tokens(self, group: int) -> int:
        """Query tokens of a program."""
        return self.block_m // group


def choose_tiles(head_dim: int, group: int, dtype: torch.dtype) -> Tiles:
    """Eight query tokens a block, or what registers allow; never a function of K or the batch."""
    block_m = 32 if group <= 4 else max_group(head_dim, dtype)
    wide = head_dim > 128 or dtype.itemsize > 2
    # Two sums of [block_m, head_dim] stay in registers.
    num_warps = 8 if block_m * head_dim > 4096 or (block_m == 64 and head_dim == 64) or (wide and head_dim > 64) else 4
    return Tiles(block_m, 32 if wide else 64, 512, num_warps, 2 if wide else 3)


@triton.jit
def _locate(item, item_seq, cu_items, cu_query_lens, context_lens, window, tokens, SPLIT_LEN: tl.constexpr):
    """An item's sequence, its place among the sequence's items, its query tokens, and the first and last split that
    these read."""
    seq = tl.load(item_seq + item)
    query_start = tl.load(cu_query_lens + seq)
    query_len = tl.load(cu_query_lens + seq + 1) - query_start
    context_len = tl.load(context_lens + seq)
    num_query_blocks = tl.cdiv(query_len, tokens)
    item_in_seq = item - tl.load(cu_items + seq)
    first_token = item_in_seq % num_query_blocks * tokens
    last_token = tl.minimum(first_token + tokens, query_len) - 1
    first_split = tl.maximum(context_len + first_token - window + 1, 0) // SPLIT_LEN
    last_split = (context_len + last_token) // SPLIT_LEN
    return (seq, query_start, query_len, context_len, num_query_blocks, item_in_seq // num_query_blocks,
            first_token, last_token, first_split, last_split)  # fmt: skip


@triton.jit
def _merge(acc, row_max, row_sum, split_acc, split_max, split_sum):
    """Rows over the splits so far, and over the next one: to be called from left to right."""
    new_max = tl.maximum(row_max, split_max)
    finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    decay = tl.exp2(row_max - finite_max)
    weight = tl.exp2(split_max - finite_max)
    return acc * decay[:, None] + split_acc * weight[:, None], new_max, row_sum * decay + split_sum * weight


@triton.jit
def _store_rows(acc, row_max, row_sum, out_ptrs, stored, valid, sinks, head):
    """Normalise [BLOCK_M, BLOCK_D] and store it. A sink enters here, behind every split; one of -inf changes no bit."""
    sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * LOG2_E
    total_max = tl.maximum(row_max, sink)
    weight = tl.exp2(row_max - total_max)
    row_sum = row_sum * weight + tl.exp2(sink - total_max)
    acc = acc * weight[:, None]
    row_sum = tl.where(row_sum == 0, 1.0, row_sum)  # a row of nobody's
    tl.store(out_ptrs, (acc / row_sum[:, None]).to(out_ptrs.dtype.element_ty), mask=stored)


@kernel(
    "query", "kv_pool", "output", "partial_acc", "stride_query_row", "stride_query_head",
    "stride_pool_slot", "stride_pool_kv", "stride_pool_head", "stride_output_row", "stride_output_head",
)  # fmt: skip
def _attend_kernel(
    query, kv_pool, page_table, cu_query_lens, context_lens, item_seq, cu_items, sinks,
    output, partial_acc, partial_max, partial_sum,
    num_seqs, num_rows, group, block_size, block_stride, window, scale_log2, softcap,
    stride_query_row, stride_query_head, stride_pool_slot, stride_pool_kv, stride_pool_head, stride_table,
    stride_output_row, stride_output_head,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT_LEN: tl.constexpr, MAX_SPLIT_TOKENS: tl.constexpr, SMALL_BLOCKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    tokens = BLOCK_M // group
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    head = kv_head * group + rows % group
    if item >= tl.load(cu_items + num_seqs):
        if item == tl.num_programs(0) - 1:  # the one program that no item ever has: zeros to the filler rows
            zeros = tl.zeros([BLOCK_M, BLOCK_D], tl.float32).to(output.dtype.element_ty)
            for first_row in range(tl.load(cu_query_lens + num_seqs), num_rows, tokens):
                row = first_row + rows // group
                pointers = output + row.to(tl.int64)[:, None] * stride_output_row + head[:, None] * stride_output_head
                in_row = (rows < tokens * group) & (row < num_rows)
                tl.store(pointers + dims[None, :], zeros, mask=in_row[:, None] & (dims < HEAD_DIM)[None, :])
        return
    (seq, query_start, query_len, context_len, _num_query_blocks, split_in_seq,
     first_token, last_token, first_split, last_split) = _locate(
        item, item_seq, cu_items, cu_query_lens, context_lens, window, tokens, SPLIT_LEN
    )  # fmt: skip
    begin_split, end_split = first_split, last_split + 1
    apart = (query_len <= MAX_SPLIT_TOKENS) & (first_split < last_split)
    if query_len <= MAX_SPLIT_TOKENS:
        begin_split = split_in_seq
        end_split = begin_split + 1
        if (begin_split < first_split) | (begin_split > last_split):
            return

    token = first_token + rows // group
    valid = (rows < tokens * group) & (token < query_len)
    position = context_len + token
    in_head = dims < HEAD_DIM
    query_ptrs = query + (query_start + token).to(tl.int64)[:, None] * stride_query_row
    query_ptrs += head[:, None] * stride_query_head + dims[None, :]
    q = tl.load(query_ptrs, mask=valid[:, None] & in_head[None, :], other=0.0)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    context_end = context_len + last_token + 1
    PAGES: tl.constexpr = SPLIT_LEN // BLOCK_N  # of a split at most, unless blocks are small
    page_idx = tl.arange(0, PAGES)
    table = page_table + seq.to(tl.int64) * stride_table
    pool = kv_pool + kv_head * stride_pool_head
    for split in range(begin_split, end_split):
        begin = split * SPLIT_LEN
        end = tl.minimum(begin + SPLIT_LEN, context_end)
        begin = tl.maximum(begin, tl.maximum(context_len + first_token - window + 1, 0) // BLOCK_N * BLOCK_N)
        page = split * SPLIT_LEN // block_size + page_idx
        # Loaded ahead of the loop: a load of the table inside it costs the loads of keys and values a stage each.
        pages = tl.load(table + page, mask=page * block_size < end, other=0)
        split_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        split_sum = tl.zeros([BLOCK_M], tl.float32)
        split_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for start in range(begin, end, BLOCK_N):
            columns = start + tl.arange(0, BLOCK_N)
            exists = columns < end
            if SMALL_BLOCKS:  # several of them in a step
                block = tl.load(table + columns // block_size, mask=exists, other=0).to(tl.int64)
            else:
                block = tl.sum(tl.where(page == start // block_size, pages, 0)).to(tl.int64)
            slot = block * block_stride + columns % block_size
            key_ptrs = pool + slot[None, :] * stride_pool_slot + dims[:, None]
            k = tl.load(key_ptrs, mask=exists[None, :] & in_head[:, None], other=0.0)
            value_ptrs = pool + stride_pool_kv + slot[:, None] * stride_pool_slot + dims[None, :]
            v = tl.load(value_ptrs, mask=exists[:, None] & in_head[None, :], other=0.0)
            scores = tl.dot(q, k, input_precision="ieee") * scale_log2
            if HAS_SOFTCAP:
                # softcap * tanh(score / softcap), with tanh(x) = 1 - 2 / (e^2x + 1); softcap carries log2(e), too.
                scores = softcap * (1 - 2 / (tl.exp2(scores * (2 * LOG2_E / softcap)) + 1))
            readable = columns[None, :] <= position[:, None]
            readable &= columns[None, :] > position[:, None] - window
            scores = tl.where(readable, scores, float("-inf"))
            new_max = tl.maximum(split_max, tl.max(scores, 1))
            finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)  # no column of this row yet
            decay = tl.exp2(split_max - finite_max)
            weights = tl.exp2(scores - finite_max[:, None])
            split_sum = split_sum * decay + tl.sum(weights, 1)
            split_acc = tl.dot(weights.to(v.dtype), v, split_acc * decay[:, None], input_precision="ieee")
            split_max = new_max
        acc, row_max, row_sum = _merge(acc, row_max, row_sum, split_acc, split_max, split_sum)

    stored = valid[:, None] & in_head[None, :]
    if not apart:
        output_ptrs = output + (query_start + token).to(tl.int64)[:, None] * stride_output_row
        output_ptrs += head[:, None] * stride_output_head + dims[None, :]
        _store_rows(acc, row_max, row_sum, output_ptrs, stored, valid, sinks, head)
    else:
        partial_row = (item.to(tl.int64) * tl.num_programs(1) + kv_head) * BLOCK_M + rows
        tl.store(partial_max + partial_row, row_max, mask=valid)
        tl.store(partial_sum + partial_row, row_sum, mask=valid)
        tl.store(partial_acc + partial_row[:, None] * HEAD_DIM + dims[None, :], acc, mask=stored)


@kernel("output", "partial_acc", "stride_output_row", "stride_output_head")
def _merge_kernel(
    cu_query_lens, context_lens, item_seq, cu_items, sinks, output, partial_acc, partial_max, partial_sum,
    num_seqs, group, window, stride_output_row, stride_output_head,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    SPLIT_LEN: tl.constexpr, MAX_SPLIT_TOKENS: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """The item of a query block's first split merges its splits, left to right, BLOCK_D of the head_dim a program."""
    tokens = BLOCK_M // group
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    if item >= tl.load(cu_items + num_seqs):
        return
    (_seq, query_start, query_len, _context_len, num_query_blocks, split_in_seq,
     first_token, _last_token, first_split, last_split) = _locate(
        item, item_seq, cu_items, cu_query_lens, context_lens, window, tokens, SPLIT_LEN
    )  # fmt: skip
    if (query_len > MAX_SPLIT_TOKENS) | (first_split == last_split):
        return
    if split_in_seq != first_split:
        return

    rows = tl.arange(0, BLOCK_M)
    dims = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    token = first_token + rows // group
    head = kv_head * group + rows % group
    valid = (rows < tokens * group) & (token < query_len)
    stored = valid[:, None] & (dims < HEAD_DIM)[None, :]
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for begin in range(first_split, last_split + 1, MERGED):
        # Loads that do not wait for each other. Splits behind the last one add exact zeros; `0 * rows` makes a vector
        # of a scalar, of which Triton's interpreter would not make a mask.
        for i in tl.static_range(MERGED):
            split_item = item + (begin + i - first_split) * num_query_blocks
            partial_row = (split_item.to(tl.int64) * tl.num_programs(1) + kv_head) * BLOCK_M + rows
            exists = valid & (begin + i + 0 * rows <= last_split)
            split_max = tl.load(partial_max + partial_row, mask=exists, other=float("-inf"))
            split_sum = tl.load(partial_sum + partial_row, mask=exists, other=0.0)
            acc_ptrs = partial_acc + partial_row[:, None] * HEAD_DIM + dims[None, :]
            split_acc = tl.load(acc_ptrs, mask=stored & exists[:, None], other=0.0)
            acc, row_max, row_sum = _merge(acc, row_max, row_sum, split_acc, split_max, split_sum)
    output_ptrs = output + (query_start + token).to(tl.int64)[:, None] * stride_output_row
    output_ptrs += head[:, None] * stride_output_head + dims[None, :]
    _store_rows(acc, row_max, row_sum, output_ptrs, stored, valid, sinks, head)


@dataclass(frozen=True)
class WorkList:
    """What each program does, worked out once for all layers of a pass."""

    item_seq: Tensor  # [W] int32, W >= the number of items
    cu_items: Tensor  # [B + 1] int32: items of sequence b are cu_items[b] .. cu_items[b + 1] - 1


def work_list_ref(
    cu_query_lens: Tensor,  # [B + 1] int32
    context_lens: Tensor,  # [B] int32, before the pass
    tokens: int,  # query tokens of a program
    split_len: int,
) -> WorkList:
    """Items of each sequence: its query blocks, times its splits where those are items of their own."""
    item_seq: list[int] = []
    cu_items = [0]
    bounds = cu_query_lens.tolist()
    for b, context_len in enumerate(context_lens.tolist()):
        query_len = bounds[b + 1] - bounds[b]
        num_items = -(-query_len // tokens)
        if query_len <= MAX_SPLIT_TOKENS:
            num_items *= -(-(context_len + query_len) // split_len)
        item_seq += [b] * num_items
        cu_items.append(len(item_seq))
    device = cu_query_lens.device
    return WorkList(
        torch.tensor(item_seq, dtype=torch.int32, device=device),
        torch.tensor(cu_items, dtype=torch.int32, device=device),
    )


@cache  # a CUDA graph may hold its address
def _no_sinks(num_heads: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((num_heads,), float("-inf"), device=device)


def _constants(head_dim: int, tiles: Tiles) -> dict[str, Any]:
    return {
        "HEAD_DIM": head_dim,
        "BLOCK_M": tiles.block_m,
        "SPLIT_LEN": tiles.split_len,
        "MAX_SPLIT_TOKENS": MAX_SPLIT_TOKENS,
        "enable_fp_fusion": False,
    }


def _merge_constants(head_dim: int, tiles: Tiles) -> dict[str, Any]:
    return _constants(head_dim, tiles) | {"BLOCK_D": MERGED_DIMS, "MERGED": MERGED_SPLITS, "num_warps": 4}


def _attend_constants(head_dim: int, tiles: Tiles, small_blocks: bool, has_softcap: bool) -> dict[str, Any]:
    return _constants(head_dim, tiles) | {
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "num_warps": tiles.num_warps,
        "BLOCK_N": tiles.block_n,
        "SMALL_BLOCKS": small_blocks,
        "HAS_SOFTCAP": has_softcap,
        # Soft-capping takes registers, which a stage less gives back where rows are few.
        "num_stages": 2 if has_softcap and tiles.block_m == 32 else tiles.num_stages,
    }


def _looks_up_each(block_size: int, head_dim: int, dtype: torch.dtype, has_softcap: bool, tiles: Tiles) -> bool:
    """Whether every position's block is looked up. Large blocks don't need it; where that is rarely a matter of speed,
    one variant serves all."""
    return block_size < tiles.block_n or head_dim <= 32 or dtype == torch.float32 or has_softcap


def variants() -> Iterator[Variant]:
    """All that `paged_attention` launches for what `limits` lets through."""
    for dtype in DTYPES:
        for head_dim in (d for d in HEAD_DIMS if fits(d, dtype)):
            for tiles in dict.fromkeys(choose_tiles(head_dim, group, dtype) for group in (1, 8)):
                of_dtype = {name: f"*{TYPES[dtype]}" for name in ("query", "kv_pool", "output")}
                floats = {name: "*fp32" for name in ("sinks", "partial_acc", "partial_max", "partial_sum")}
                ints = {name: "*i32" for name in ("cu_query_lens", "context_lens", "item_seq", "cu_items")}
                types = floats | ints | {"output": of_dtype["output"]}
                yield Variant(_merge_kernel, types, _merge_constants(head_dim, tiles))
                types = types | of_dtype | {"page_table": "*i32", "scale_log2": "fp32", "softcap": "fp32"}
                for has_softcap in (False, True):
                    ways = {_looks_up_each(size, head_dim, dtype, has_softcap, tiles) for size in BLOCK_SIZES}
                    for way in sorted(ways):
                        yield Variant(_attend_kernel, types, _attend_constants(head_dim, tiles, way, has_softcap))


def paged_attention(
    query: Tensor,  # [N, Hq, D] dtype
    kv_pool: Tensor,  # [P * S, 2, Hkv, D] dtype; [:, 0] keys, [:, 1] values; holds this pass's tokens already
    page_table: Tensor,  # [B, max_blocks] int32
    cu_query_lens: Tensor,  # [B + 1] int32; N may exceed the last: those rows are filler
    context_lens: Tensor,  # [B] int32, before the pass
    block_size: int,  # S, a power of two from 16 to MAX_BLOCK_SIZE
    work_list: WorkList,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [Hq] float32
    output: Tensor | None = None,  # [N, Hq, D] dtype, written as a whole
    tiles: Tiles | None = None,  # those of the work list; default: choose_tiles
    block_stride: int | None = None,  # slots from a block to the next one; default: block_size
) -> Tensor:  # [N, Hq, D] dtype, zeros in filler rows
    """What `paged_attention_ref` says. D is contiguous everywhere; nothing waits for the device."""
    if block_size > MAX_BLOCK_SIZE:
        raise ValueError(f"block_size={block_size} is more than {MAX_BLOCK_SIZE}: positions would overflow")
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = kv_pool.shape[2]
    group = num_heads // num_kv_heads
    tiles = tiles or choose_tiles(head_dim, group, query.dtype)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device) if output is None else output
    num_items, num_seqs = work_list.item_seq.shape[0], context_lens.shape[0]
    partial_rows = num_items * num_kv_heads * tiles.block_m
    partial_acc = torch.empty(partial_rows, head_dim, dtype=torch.float32, device=query.device)
    partial_max, partial_sum = torch.empty(2, partial_rows, dtype=torch.float32, device=query.device)
    scale_log2 = (1 / math.sqrt(head_dim) if scaling is None else scaling) * LOG2_E.value
    sinks = _no_sinks(num_heads, query.device) if sinks is None else sinks
    window = NO_WINDOW if window is None else window
    small_blocks = _looks_up_each(block_size, head_dim, query.dtype, softcap is not None, tiles)
    _attend_kernel[(num_items + 1, num_kv_heads)](
        query, kv_pool, page_table, cu_query_lens, context_lens, work_list.item_seq, work_list.cu_items, sinks,
        output, partial_acc, partial_max, partial_sum,
        num_seqs, num_rows, group, block_size, block_stride or block_size, window, scale_log2,
        (softcap or 0.0) * LOG2_E.value,
        query.stride(0), query.stride(1), kv_pool.stride(0), kv_pool.stride(1), kv_pool.stride(2),
        page_table.stride(0), output.stride(0), output.stride(1),
        **_attend_constants(head_dim, tiles, small_blocks, softcap is not None),
    )  # fmt: skip
    _merge_kernel[(num_items, num_kv_heads, triton.cdiv(head_dim, MERGED_DIMS))](
        cu_query_lens, context_lens, work_list.item_seq, work_list.cu_items, sinks,
        output, partial_acc, partial_max, partial_sum,
        num_seqs, group, window, output.stride(0), output.stride(1), **_merge_constants(head_dim, tiles),
    )  # fmt: skip
    return output


def paged_attention_ref(
    query: Tensor,  # [N, Hq, D] dtype
    kv_pool: Tensor,  # [P * S, 2, Hkv, D] dtype; [:, 0] keys, [:, 1] values; holds this pass's tokens already
    page_table: Tensor,  # [B, max_blocks] int32
    cu_query_lens: Tensor,  # [B + 1] int32; N may exceed the last: those rows are filler
    context_lens: Tensor,  # [B] int32, before the pass
    block_size: int,  # S
    scaling: float | None = None,  # default 1 / sqrt(D)
    window: int | None = None,  # a token reads itself and the window - 1 tokens before it
    softcap: float | None = None,  # scores become softcap * tanh(score / softcap)
    sinks: Tensor | None = None,  # [Hq]: a logit in each head's softmax that has no value
    block_stride: int | None = None,  # slots from a block to the next one; default: block_size
) -> Tensor:  # [N, Hq, D] dtype, zeros in filler rows
    """Token t of sequence b, at position p = context_lens[b] + t, reads positions 0 .. p of b and nothing else."""
    num_kv_heads, head_dim = kv_pool.shape[2:]
    group = query.shape[1] // num_kv_heads
    scaling = 1 / math.sqrt(head_dim) if scaling is None else scaling
    output = torch.zeros_like(query)
    bounds = cu_query_lens.tolist()
    for b, (context_len, blocks) in enumerate(zip(context_lens.tolist(), page_table.tolist(), strict=True)):
        for token, row in enumerate(range(bounds[b], bounds[b + 1])):
            position = context_len + token
            first = 0 if window is None else max(0, position - window + 1)
            slots = [
                blocks[p // block_size] * (block_stride or block_size) + p % block_size
                for p in range(first, position + 1)
            ]
            for kv_head in range(num_kv_heads):
                keys = kv_pool[slots, 0, kv_head].float()  # [position - first + 1, D]
                values = kv_pool[slots, 1, kv_head].float()
                for head in range(kv_head * group, (kv_head + 1) * group):
                    scores = keys @ query[row, head].float() * scaling
                    if softcap is not None:
                        scores = torch.tanh(scores / softcap) * softcap
                    if sinks is not None:
                        scores = torch.cat([scores, sinks[head].float().view(1)])
                    weights = torch.softmax(scores, dim=0)
                    output[row, head] = (weights[: len(slots)] @ values).to(query.dtype)
    return output
