"""EXSPEC's layout: each sequence has a cache of its own, and those of a batch are put together for its passes."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from specpaged.engine.kv_layout import KVLayout
from specpaged.engine.scheduler import ScheduledSequence
from specpaged.engine.sequence import Sequence
from specpaged.paging.block_allocator import BlockAllocator, IntegrityError
from specpaged.paging.kv_cache import KVSpec
from specpaged.research.dense_kv_cache import DenseKVCache
from specpaged.research.dense_table import DenseTable


class GroupKVCache(DenseKVCache):
    """num_rows rows of a batch, and a cache [layers, num_columns, 2, Hkv, D] for each of num_sequences."""

    def __init__(
        self,
        kv_spec: KVSpec,
        num_rows: int,
        num_columns: int,
        dtype: torch.dtype,
        device: torch.device | str,
        num_sequences: int,
    ):
        super().__init__(kv_spec, num_rows, num_columns, dtype, device)
        self.num_blocks = num_sequences
        self.caches: list[list[Tensor]] = [  # by sequence, as the stacks
            [
                torch.empty((len(stack), num_columns, *stack.shape[2:]), dtype=dtype, device=device)
                for stack in self.stacks
            ]
            for _ in range(num_sequences)
        ]

    @property
    def tensors(self) -> list[Tensor]:
        """See DenseKVCache."""
        return [*self.stacks, *(own for of_sequence in self.caches for own in of_sequence)]


class GroupTable(DenseTable):
    """A DenseTable whose block is its own cache, and whose row is the batch's, for as long as it is in one."""

    __slots__ = ("num_cached", "num_placed")

    def __init__(self, allocator: BlockAllocator, width: int, num_pools: int):
        super().__init__(allocator, width, num_pools)
        self.num_cached = [0] * num_pools  # by pool: tokens that are in the sequence's own cache
        self.num_placed = [0] * num_pools  # by pool: tokens that are in the row, from `start` on

    def truncate(self, pool: int, num_tokens: int) -> int:
        """See PageTable."""
        for held in (self.num_cached, self.num_placed):
            held[pool] = min(held[pool], num_tokens)
        return super().truncate(pool, num_tokens)

    def leave(self) -> None:
        """The row is somebody else's now."""
        self.row = self.start = None
        self.num_placed = [0] * len(self.num_placed)

    def _drop(self, num_kept: int) -> int:
        if num_kept == 0:
            self.leave()
            self.num_cached = [0] * len(self.num_cached)
        return super()._drop(num_kept)


class Group(KVLayout):
    """Rejecting drafts costs nothing, as the sequences' own caches are ragged; every new batch is put together anew.

    A batch's rows end in one column before they draft, sequences of one length all beginning in column 0. A sequence
    that is in the batch again, in its old place, is not copied again; what a round adds is copied to its own cache.
    """

    name = "group"
    shares_blocks = False

    def __init__(self, kv_caches: SequenceOf[GroupKVCache], max_model_len: int, num_rows: int):
        super().__init__(kv_caches[0].num_columns)
        self.kv_caches = kv_caches
        self.rows: list[GroupTable | None] = [None] * num_rows

    def new_table(self, allocator: BlockAllocator, num_pools: int) -> GroupTable:
        """See KVLayout."""
        return GroupTable(allocator, self.tokens_per_block, num_pools)

    def place(self, entries: SequenceOf[ScheduledSequence]) -> None:
        """See KVLayout."""
        tables = {entry.sequence.page_table: entry.context_len + entry.num_new_tokens for entry in entries}
        for row, table in enumerate(self.rows):
            if table is not None and table.row != row:  # it has given up its KV since, and may have begun anew
                self.rows[row] = None
            elif table is not None and table not in tables:
                table.leave()
                self.rows[row] = None
        free = [row for row, table in enumerate(self.rows) if table is None]
        length = max(tables.values())
        for table, end in tables.items():
            if table.row is None:
                table.row = free.pop(0)
                self.rows[table.row] = table
            if table.start != length - end:
                table.start = length - end
                table.num_placed = [0] * len(table.num_placed)
            for pool, context_len in enumerate(table.context_lens):
                copied = self._copy(table, pool, table.num_placed[pool], context_len, to_row=True)
                self.copied.gather += copied
                table.num_placed[pool] = context_len

    def realign(self, running: SequenceOf[Sequence]) -> None:
        """See KVLayout: what the round has added goes to the sequences' own caches."""
        self.rows = [table if table is not None and table.row is not None else None for table in self.rows]
        for table in self.rows:
            if table is None:
                continue
            for pool, context_len in enumerate(table.context_lens):
                self.copied.other += self._copy(table, pool, table.num_cached[pool], context_len, to_row=False)
                table.num_cached[pool] = table.num_placed[pool] = context_len

    def _copy(self, table: GroupTable, pool: int, first: int, last: int, to_row: bool) -> int:
        """Copy tokens first .. last - 1 from the sequence's cache to its row, or from there; the bytes."""
        if first >= last:
            return 0
        cache, (begin,) = self.kv_caches[pool], table.entries
        for stack, own in zip(cache.stacks, cache.caches[table.blocks[0] - 1], strict=True):
            in_row, in_cache = stack[:, begin + first : begin + last], own[:, first:last]
            if to_row:
                in_row.copy_(in_cache)
            else:
                in_cache.copy_(in_row)
        return (last - first) * cache.bytes_per_token

    def check_integrity(self) -> None:
        """Every row is that of the sequence that it is kept for, which has all of its KV in a cache of its own."""
        for row, table in enumerate(self.rows):
            if table is None or table.row is None:
                continue
            if table.row != row or table.num_cached != table.context_lens:
                raise IntegrityError(
                    f"row {row} is kept for a sequence that has row {table.row}, and {table.num_cached} of its "
                    f"{table.context_lens} tokens in a cache of its own"
                )
