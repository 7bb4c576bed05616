"""Builds a ragged batch on the device, of tokens and lengths that the host need not know.

Each sequence runs its tokens from `starts` to `ends`: known ones, and drafts behind them. Two sequences, S = 4: A has 5
tokens of context in blocks 2 7, and behind them a known token a and drafts p q; B has no context, owns block 1 and
prefills d e. Six rows of room:

    token_ids      a  p  q  d  e  0        starts  5 0        cu_query_lens  0 3 5
    positions      5  6  7  0  1  0        ends    8 2        logits_idx     0 1 2 4
    slot_mapping  29 30 31  4  5  0        wanted  3 1        cu_logits      0 3 4
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from specpaged_kernels.jit import Variant, kernel
from specpaged_kernels.paged_attention import MAX_SPLIT_TOKENS, WorkList, work_list_ref


@dataclass(frozen=True)
class Packed:
    """The arguments of a pass. Rows from cu_query_lens[B] on are filler: token 0 at position 0 in slot 0."""

    token_ids: Tensor  # [N] int64
    positions: Tensor  # [N] int64
    slot_mapping: Tensor  # [N] int64
    cu_query_lens: Tensor  # [B + 1] int32
    logits_idx: Tensor  # [M] int64: rows whose logits are wanted; behind cu_logits[B] it is 0
    cu_logits: Tensor  # [B + 1] int32
    work_list: WorkList  # of paged_attention, with room for W items


@kernel()
def _pack_kernel(
    sequence_ids, starts, ends, num_logits, page_table,
    token_ids, positions, slot_mapping, cu_query_lens, logits_idx, cu_logits, item_seq, cu_items,
    num_seqs, num_rows, max_logits, max_items, block_size, tokens, split_len, stride_ids, stride_table,
    BLOCK_B: tl.constexpr, BLOCK_T: tl.constexpr, MAX_SPLIT_TOKENS: tl.constexpr,
):  # fmt: skip
    """One program per sequence, each with its own prefix sums, and one for the filler."""
    b = tl.program_id(0)
    idx = tl.arange(0, BLOCK_B)
    exists = idx < num_seqs
    all_ends = tl.load(ends + idx, mask=exists, other=0)
    lens = all_ends - tl.load(starts + idx, mask=exists, other=0)
    splits = tl.where(lens <= MAX_SPLIT_TOKENS, tl.cdiv(all_ends, split_len), 1)
    items = tl.cdiv(lens, tokens) * splits
    logits = tl.load(num_logits + idx, mask=exists, other=0)
    row = tl.sum(tl.where(idx < b, lens, 0))
    item = tl.sum(tl.where(idx < b, items, 0))
    logit = tl.sum(tl.where(idx < b, logits, 0))
    tl.store(cu_query_lens + b, row)
    tl.store(cu_items + b, item)
    tl.store(cu_logits + b, logit)
    steps = tl.arange(0, BLOCK_T)
    if b == num_seqs:
        for first in range(row, num_rows, BLOCK_T):
            filler = (first + steps) < num_rows
            tl.store(token_ids + first + steps, tl.zeros([BLOCK_T], tl.int64), mask=filler)
            tl.store(positions + first + steps, tl.zeros([BLOCK_T], tl.int64), mask=filler)
            tl.store(slot_mapping + first + steps, tl.zeros([BLOCK_T], tl.int64), mask=filler)
        for first in range(logit, max_logits, BLOCK_T):
            tl.store(logits_idx + first + steps, tl.zeros([BLOCK_T], tl.int64), mask=(first + steps) < max_logits)
        for first in range(item, max_items, BLOCK_T):
            tl.store(item_seq + first + steps, tl.zeros([BLOCK_T], tl.int32), mask=(first + steps) < max_items)
        return
    start = tl.load(starts + b)
    length = tl.load(ends + b) - start
    for first in range(0, length, BLOCK_T):
        t = first + steps
        runs = t < length
        position = start.to(tl.int64) + t
        token_id = tl.load(sequence_ids + b.to(tl.int64) * stride_ids + position, mask=runs, other=0).to(tl.int64)
        table = page_table + b.to(tl.int64) * stride_table
        block = tl.load(table + position // block_size, mask=runs, other=0).to(tl.int64)
        # Room is the host's to give, and lengths are known here alone: what does not fit is lost, not strewn.
        stored = runs & (row + t < num_rows)
        tl.store(token_ids + row + t, token_id, mask=stored)
        tl.store(positions + row + t, position, mask=stored)
        tl.store(slot_mapping + row + t, block * block_size + position % block_size, mask=stored)
    wanted = tl.load(num_logits + b)
    for first in range(0, wanted, BLOCK_T):
        j = first + steps
        stored = (j < wanted) & (logit + j < max_logits)
        tl.store(logits_idx + logit + j, (row + length - wanted + j).to(tl.int64), mask=stored)
    num_items = tl.sum(tl.where(idx == b, items, 0))
    for first in range(0, num_items, BLOCK_T):
        tl.store(item_seq + item + first + steps, tl.zeros([BLOCK_T], tl.int32) + b,
                 mask=(first + steps < num_items) & (item + first + steps < max_items))  # fmt: skip


BLOCKS = (64, 1024)  # sequences, the next of these


def _block(num_seqs: int) -> int:
    for block in BLOCKS:
        if num_seqs <= block:
            return block
    raise ValueError(f"a batch has {num_seqs} sequences; allowed: up to {BLOCKS[-1]}")


def _constants(block: int) -> dict[str, Any]:
    return {"BLOCK_B": block, "BLOCK_T": 64, "MAX_SPLIT_TOKENS": MAX_SPLIT_TOKENS, "num_warps": 1 if block < 128 else 4}


def variants() -> Iterator[Variant]:
    """All that `pack` launches."""
    wide = ("token_ids", "positions", "slot_mapping", "logits_idx")
    narrow = ("sequence_ids", "starts", "ends", "num_logits", "page_table", "cu_query_lens", "cu_logits", "item_seq",
              "cu_items")  # fmt: skip
    types = {name: "*i64" for name in wide} | {name: "*i32" for name in narrow}
    for block in BLOCKS:
        yield Variant(_pack_kernel, types, _constants(block))


def pack(
    sequence_ids: Tensor,  # [B, max_model_len] int32: the tokens of each sequence, from its first one on
    starts: Tensor,  # [B] int32: tokens before the pass that have KV
    ends: Tensor,  # [B] int32: those behind it; who has as many as before does not run
    num_logits: Tensor,  # [B] int32: of how many last rows of the sequence logits are wanted
    page_table: Tensor,  # [B, max_blocks] int32, covering all that the pass writes
    block_size: int,
    num_rows: int,  # N, at least all tokens
    max_logits: int,  # M, at least all that are wanted
    max_items: int,  # W, at least the work list's
    tokens: int,  # query tokens of a program of paged_attention: Tiles.tokens(G)
    split_len: int,
) -> Packed:
    """What `pack_ref` says; nothing waits for the device, which alone may know tokens and lengths."""
    num_seqs, device = starts.shape[0], starts.device
    rows = [torch.empty(num_rows, dtype=torch.int64, device=device) for _ in range(3)]
    bounds = [torch.empty(num_seqs + 1, dtype=torch.int32, device=device) for _ in range(3)]
    logits_idx = torch.empty(max_logits, dtype=torch.int64, device=device)
    item_seq = torch.empty(max_items, dtype=torch.int32, device=device)
    _pack_kernel[(num_seqs + 1,)](
        sequence_ids, starts, ends, num_logits, page_table,
        *rows, bounds[0], logits_idx, bounds[1], item_seq, bounds[2],
        num_seqs, num_rows, max_logits, max_items, block_size, tokens, split_len,
        sequence_ids.stride(0), page_table.stride(0), **_constants(_block(num_seqs)),
    )  # fmt: skip
    return Packed(*rows, bounds[0], logits_idx, bounds[1], WorkList(item_seq, bounds[2]))


def pack_ref(
    sequence_ids: Tensor,
    starts: Tensor,
    ends: Tensor,
    num_logits: Tensor,
    page_table: Tensor,
    block_size: int,
    num_rows: int,
    max_logits: int,
    max_items: int,
    tokens: int,
    split_len: int,
) -> Packed:
    """Each sequence's tokens from its start to its end, at the positions and in the slots that are theirs."""
    rows: list[tuple[int, int, int]] = []
    cu_query_lens, cu_logits, logits_idx = [0], [0], []
    for b, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        for position in range(start, end):
            block = int(page_table[b, position // block_size])
            rows.append((int(sequence_ids[b, position]), position, block * block_size + position % block_size))
        cu_query_lens.append(len(rows))
        logits_idx += range(len(rows) - int(num_logits[b]), len(rows))
        cu_logits.append(len(logits_idx))
    bounds = torch.tensor(cu_query_lens, dtype=torch.int32)
    work_list = work_list_ref(bounds, starts, tokens, split_len)
    padded = torch.tensor(rows + [(0, 0, 0)] * (num_rows - len(rows)), dtype=torch.int64)
    return Packed(
        *padded.view(-1, 3).T,
        bounds,
        torch.tensor(logits_idx + [0] * (max_logits - len(logits_idx)), dtype=torch.int64),
        torch.tensor(cu_logits, dtype=torch.int32),
        WorkList(
            torch.nn.functional.pad(work_list.item_seq, (0, max_items - len(work_list.item_seq))), work_list.cu_items
        ),
    )
