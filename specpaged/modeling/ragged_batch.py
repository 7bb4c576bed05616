"""The ragged batch: what one forward pass runs, as values.

Dimensions, used beside every tensor of the project:
    B sequences in the pass      N packed tokens          M rows whose logits are wanted
    K draft tokens a sequence    V vocabulary             L layers, H hidden size
    R rows whose hidden states are wanted
    P blocks                     S block_size             Hq / Hkv heads, D head_dim
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RaggedRow:
    """One sequence's share of a forward pass, in ints: of the target's, out of a ScheduledSequence, or of a draft
    model's, out of a DraftRow.

    `blocks` is the sequence's page table and covers `context_len + len(token_ids)` slots; `context_len` tokens
    already have valid KV, so it is also the position of `token_ids[0]`. Logits are wanted for the last
    `num_logits` tokens, and hidden states, where a pass is asked for any, for the last `num_hidden`.
    """

    token_ids: Sequence[int]
    context_len: int
    blocks: Sequence[int]
    num_logits: int
    num_hidden: int = 0


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Packed rows of several sequences, without padding.

    Two sequences with block_size 4: A has 5 tokens of context in blocks [2, 7] and runs 3 tokens a b c;
    B has no context, owns block [1] and runs 2 tokens d e; wanted are logits of A's last two tokens and of B's last,
    and hidden states of both of B's:

        token_ids      a  b  c  d  e         cu_query_lens  0 3 5
        positions      5  6  7  0  1         context_lens   5 0
        slot_mapping  29 30 31  4  5         page_table     2 7
        logits_idx        1  2     4                        1 0    (0: the null block)
        hidden_idx              3  4         output_idx     1 2 3 4
    """

    token_ids: Tensor  # [N] int64
    positions: Tensor  # [N] int64
    slot_mapping: Tensor  # [N] int64, block * block_stride + offset
    page_table: Tensor  # [B, max_blocks] int32, filled up with the null block
    cu_query_lens: Tensor  # [B + 1] int32
    context_lens: Tensor  # [B] int32, before the pass
    logits_idx: Tensor  # [M] int64, ascending
    query_lens: tuple[int, ...]  # host mirrors of the above, one per sequence
    context_lens_host: tuple[int, ...]
    num_logits: tuple[int, ...]
    block_size: int
    block_stride: int  # slots from a block to the next one: block_size, unless blocks are a dense batch's rows
    hidden_idx: Tensor | None = None  # [R] int64, ascending; None: of no row
    num_hidden: tuple[int, ...] = ()  # host mirror: one per sequence, or none where hidden_idx is None

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    def output_idx(self) -> Tensor:
        """[U] int64, ascending: the rows that logits or hidden states are wanted of. Nothing waits for the device."""
        if self.num_hidden in ((), self.num_logits):
            return self.logits_idx
        rows = []
        ends = accumulate(self.query_lens)
        for end, num_logits, num_hidden in zip(ends, self.num_logits, self.num_hidden, strict=True):
            rows.extend(range(end - max(num_logits, num_hidden), end))
        return upload(ints(rows), self.token_ids.device)


def ints(values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
    """Ints, at least one, as a tensor [n] int64 or int32 on the host: several times quicker than torch.tensor."""
    return torch.frombuffer(array("q" if dtype == torch.int64 else "i", values), dtype=dtype)


def flat_page_table(tables: Sequence[Sequence[int]], width: int) -> list[int]:
    """[B * width]: of each sequence its first blocks, filled up with the null block.

    A table may be longer than what a pass reads, by blocks reserved for drafts to come.
    """
    flat: list[int] = []
    for blocks in tables:
        flat.extend(blocks[:width])
        if len(blocks) < width:
            flat.extend([0] * (width - len(blocks)))
    return flat


def upload(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A host tensor on the device; to a GPU through pinned memory, as a copy from pageable memory would wait."""
    if torch.device(device).type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def pack(
    rows: Sequence[RaggedRow],
    block_size: int,
    device: torch.device | str = "cpu",
    block_stride: int | None = None,
) -> RaggedBatch:
    """Pack the rows of B sequences, in order, into one batch of N tokens. `block_stride` is block_size by default."""
    stride = block_stride or block_size
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logits_idx: list[int] = []
    hidden_idx: list[int] = []
    cu_query_lens = [0]
    for row in rows:
        start, end = row.context_len, row.context_len + len(row.token_ids)
        token_ids.extend(row.token_ids)
        positions.extend(range(start, end))
        while start < end:  # block by block
            block_idx, offset = divmod(start, block_size)
            count = min(end - start, block_size - offset)
            slot = row.blocks[block_idx] * stride + offset
            slots.extend(range(slot, slot + count))
            start += count
        cu_query_lens.append(len(token_ids))
        logits_idx.extend(range(len(token_ids) - row.num_logits, len(token_ids)))
        if row.num_hidden:
            hidden_idx.extend(range(len(token_ids) - row.num_hidden, len(token_ids)))
    width = max(-(-(row.context_len + len(row.token_ids)) // block_size) for row in rows)
    page_table = flat_page_table([row.blocks for row in rows], width)
    context_lens = tuple(row.context_len for row in rows)
    num_tokens, num_seqs = len(token_ids), len(rows)
    # Two uploads in all.
    wide = upload(ints([*token_ids, *positions, *slots, *logits_idx, *hidden_idx]), device)
    narrow = upload(ints([*page_table, *cu_query_lens, *context_lens], torch.int32), device)
    table, bounds, contexts = narrow.split_with_sizes([num_seqs * width, num_seqs + 1, num_seqs])
    sizes = [num_tokens] * 3 + [len(logits_idx), len(hidden_idx)]
    flat_ids, flat_positions, flat_slots, flat_logits_idx, flat_hidden_idx = wide.split_with_sizes(sizes)
    return RaggedBatch(
        token_ids=flat_ids,
        positions=flat_positions,
        slot_mapping=flat_slots,
        page_table=table.view(num_seqs, width),
        cu_query_lens=bounds,
        context_lens=contexts,
        logits_idx=flat_logits_idx,
        query_lens=tuple(len(row.token_ids) for row in rows),
        context_lens_host=context_lens,
        num_logits=tuple(row.num_logits for row in rows),
        block_size=block_size,
        block_stride=stride,
        hidden_idx=flat_hidden_idx if hidden_idx else None,
        num_hidden=tuple(row.num_hidden for row in rows) if hidden_idx else (),
    )
