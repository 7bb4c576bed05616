"""Builds a ragged batch on the device, from what the host knows ahead of a step and the drafts that it need not see.

Two sequences, S = 4: A has 5 tokens of context in blocks 2 7, runs one known token a and verifies drafts p q; B has no
context, owns block 1 and prefills d e. Six rows of room:

    token_ids      a  p  q  d  e  0        cu_query_lens  0 3 5
    positions      5  6  7  0  1  0        logits_idx     0 1 2 4    (A: the known token and both drafts; B: the last)
    slot_mapping  29 30 31  4  5  0        cu_logits      0 3 4
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
    new_token_ids, cu_new_lens, drafts, num_drafts, num_logits, context_lens, page_table,
    token_ids, positions, slot_mapping, cu_query_lens, logits_idx, cu_logits, item_seq, cu_items,
    num_seqs, num_rows, max_logits, max_items, block_size, tokens, split_len, stride_drafts, stride_table,
    BLOCK_B: tl.constexpr, BLOCK_T: tl.constexpr, MAX_SPLIT_TOKENS: tl.constexpr,
):  # fmt: skip
    """One program per sequence, each with its own prefix sums, and one for the filler."""
    b = tl.program_id(0)
    idx = tl.arange(0, BLOCK_B)
    exists = idx < num_seqs
    new_lens = tl.load(cu_new_lens + idx + 1, mask=exists, other=0) - tl.load(cu_new_lens + idx, mask=exists, other=0)
    lens = new_lens + tl.load(num_drafts + idx, mask=exists, other=0)
    contexts = tl.load(context_lens + idx, mask=exists, other=0)
    splits = tl.where(lens <= MAX_SPLIT_TOKENS, tl.cdiv(contexts + lens, split_len), 1)
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
        for start in range(row, num_rows, BLOCK_T):
            filler = (start + steps) < num_rows
            tl.store(token_ids + start + steps, tl.zeros([BLOCK_T], tl.int64), mask=filler)
            tl.store(positions + start + steps, tl.zeros([BLOCK_T], tl.int64), mask=filler)
            tl.store(slot_mapping + start + steps, tl.zeros([BLOCK_T], tl.int64), mask=filler)
        for start in range(logit, max_logits, BLOCK_T):
            tl.store(logits_idx + start + steps, tl.zeros([BLOCK_T], tl.int64), mask=(start + steps) < max_logits)
        for start in range(item, max_items, BLOCK_T):
            tl.store(item_seq + start + steps, tl.zeros([BLOCK_T], tl.int32), mask=(start + steps) < max_items)
        return
    first_new = tl.load(cu_new_lens + b)
    new_len = tl.load(cu_new_lens + b + 1) - first_new
    length = new_len + tl.load(num_drafts + b)
    context = tl.load(context_lens + b)
    for start in range(0, length, BLOCK_T):
        t = start + steps
        known = tl.load(new_token_ids + first_new + t, mask=t < new_len, other=0)
        drafted = (t >= new_len) & (t < length)
        draft = tl.load(drafts + b * stride_drafts + t - new_len, mask=drafted, other=0)
        position = (context + t).to(tl.int64)
        table = page_table + b.to(tl.int64) * stride_table
        block = tl.load(table + position // block_size, mask=t < length, other=0).to(tl.int64)
        # Room is the host's to give, and lengths are known here alone: what does not fit is lost, not strewn.
        stored = (t < length) & (row + t < num_rows)
        tl.store(token_ids + row + t, tl.where(drafted, draft, known), mask=stored)
        tl.store(positions + row + t, position, mask=stored)
        tl.store(slot_mapping + row + t, block * block_size + position % block_size, mask=stored)
    wanted = tl.load(num_logits + b)
    for start in range(0, wanted, BLOCK_T):
        j = start + steps
        stored = (j < wanted) & (logit + j < max_logits)
        tl.store(logits_idx + logit + j, (row + length - wanted + j).to(tl.int64), mask=stored)
    num_items = tl.sum(tl.where(idx == b, items, 0))
    for start in range(0, num_items, BLOCK_T):
        tl.store(item_seq + item + start + steps, tl.zeros([BLOCK_T], tl.int32) + b,
                 mask=(start + steps < num_items) & (item + start + steps < max_items))  # fmt: skip


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
    wide = ("new_token_ids", "drafts", "token_ids", "positions", "slot_mapping", "logits_idx")
    narrow = ("cu_new_lens", "num_drafts", "num_logits", "context_lens", "page_table", "cu_query_lens", "cu_logits",
              "item_seq", "cu_items")  # fmt: skip
    types = {name: "*i64" for name in wide} | {name: "*i32" for name in narrow}
    for block in BLOCKS:
        yield Variant(_pack_kernel, types, _constants(block))


def pack(
    new_token_ids: Tensor,  # [T] int64: known tokens to run, sequence after sequence
    cu_new_lens: Tensor,  # [B + 1] int32
    drafts: Tensor,  # [B, K] int64
    num_drafts: Tensor,  # [B] int32: how many of the drafts are verified
    num_logits: Tensor,  # [B] int32: of how many last rows of the sequence logits are wanted
    context_lens: Tensor,  # [B] int32, before the pass
    page_table: Tensor,  # [B, max_blocks] int32, covering all that the pass writes
    block_size: int,
    num_rows: int,  # N, at least all tokens
    max_logits: int,  # M, at least all that are wanted
    max_items: int,  # W, at least the work list's
    tokens: int,  # query tokens of a program of paged_attention: Tiles.tokens(G)
    split_len: int,
) -> Packed:
    """What `pack_ref` says; nothing waits for the device, which alone may know drafts and lengths."""
    num_seqs, device = context_lens.shape[0], context_lens.device
    rows = [torch.empty(num_rows, dtype=torch.int64, device=device) for _ in range(3)]
    bounds = [torch.empty(num_seqs + 1, dtype=torch.int32, device=device) for _ in range(3)]
    logits_idx = torch.empty(max_logits, dtype=torch.int64, device=device)
    item_seq = torch.empty(max_items, dtype=torch.int32, device=device)
    _pack_kernel[(num_seqs + 1,)](
        new_token_ids, cu_new_lens, drafts, num_drafts, num_logits, context_lens, page_table,
        *rows, bounds[0], logits_idx, bounds[1], item_seq, bounds[2],
        num_seqs, num_rows, max_logits, max_items, block_size, tokens, split_len,
        drafts.stride(0), page_table.stride(0), **_constants(_block(num_seqs)),
    )  # fmt: skip
    return Packed(*rows, bounds[0], logits_idx, bounds[1], WorkList(item_seq, bounds[2]))


def pack_ref(
    new_token_ids: Tensor,
    cu_new_lens: Tensor,
    drafts: Tensor,
    num_drafts: Tensor,
    num_logits: Tensor,
    context_lens: Tensor,
    page_table: Tensor,
    block_size: int,
    num_rows: int,
    max_logits: int,
    max_items: int,
    tokens: int,
    split_len: int,
) -> Packed:
    """Each sequence's known tokens, then its drafts, at the positions behind its context."""
    rows: list[tuple[int, int, int]] = []
    cu_query_lens, cu_logits, logits_idx = [0], [0], []
    for b, context_len in enumerate(context_lens.tolist()):
        ids = new_token_ids[int(cu_new_lens[b]) : int(cu_new_lens[b + 1])].tolist()
        ids += drafts[b, : int(num_drafts[b])].tolist()
        for position, token_id in enumerate(ids, context_len):
            block = int(page_table[b, position // block_size])
            rows.append((token_id, position, block * block_size + position % block_size))
        cu_query_lens.append(len(rows))
        logits_idx += range(len(rows) - int(num_logits[b]), len(rows))
        cu_logits.append(len(logits_idx))
    bounds = torch.tensor(cu_query_lens, dtype=torch.int32)
    work_list = work_list_ref(bounds, context_lens, tokens, split_len)
    padded = torch.tensor(rows + [(0, 0, 0)] * (num_rows - len(rows)), dtype=torch.int64)
    return Packed(
        *padded.T,
        bounds,
        torch.tensor(logits_idx + [0] * (max_logits - len(logits_idx)), dtype=torch.int64),
        torch.tensor(cu_logits, dtype=torch.int32),
        WorkList(
            torch.nn.functional.pad(work_list.item_seq, (0, max_items - len(work_list.item_seq))), work_list.cu_items
        ),
    )
