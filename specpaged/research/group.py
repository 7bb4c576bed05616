"""EXSPEC's layout: each sequence has a cache of its own, and those of a batch are put together for its passes."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor
from typing_extensions import override

from specpaged.engine.kv_layout import KVLayout
from specpaged.engine.scheduler import ScheduledSequence
from specpaged.engine.sequence import Sequence
from specpaged.paging.block_allocator import BlockAllocator, IntegrityError
from specpaged.paging.kv_cache import KVSpec
from specpaged.paging.page_table import TARGET
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
    @override
    def tensors(self) -> list[Tensor]:
        return [*self.stacks, *(own for of_sequence in self.caches for own in of_sequence)]


class GroupTable(DenseTable):
    """A DenseTable whose block is its own cache, and whose row is the batch's, for as long as it is in one.

    While it is, the row holds all of its valid tokens, and the cache those that stood at the last realignment.
    """

    __slots__ = ("num_cached",)

    def __init__(self, allocator: BlockAllocator, width: int, num_pools: int):
        super().__init__(allocator, width, num_pools)
        self.num_cached = [0] * num_pools  # by pool: tokens that are in the sequence's own cache

    @override
    def truncate(self, pool: int, num_tokens: int) -> int:
        self.num_cached[pool] = min(self.num_cached[pool], num_tokens)
        return super().truncate(pool, num_tokens)

    def leave(self) -> None:
        """Give up the row, which another sequence may take."""
        self.row = self.start = None

    @override
    def _drop(self, num_kept: int) -> int:
        if num_kept == 0:
            self.leave()
            self.num_cached = [0] * len(self.num_cached)
        return super()._drop(num_kept)


class Group(KVLayout):
    """Rejecting drafts costs nothing, as the sequences' own caches are ragged; every new batch is put together anew.

    A batch's rows end in one column before they are scored, sequences of one length all beginning in column 0. A
    sequence that is in the batch again, in its old place, is not copied again. What a round adds is copied to its own
    cache when it stands; what the draft wrote for drafts that wait to be verified, only if the row moves or is given up
    before that.
    """

    name = "group"
    shares_blocks = False

    def __init__(self, kv_caches: SequenceOf[GroupKVCache], max_model_len: int, num_rows: int):
        super().__init__(kv_caches[0].num_columns)
        self.kv_caches = kv_caches
        self.rows: list[GroupTable | None] = [None] * num_rows

    @override
    def new_table(self, allocator: BlockAllocator, num_pools: int) -> GroupTable:
        return GroupTable(allocator, self.tokens_per_block, num_pools)

    @override
    def place(self, entries: SequenceOf[ScheduledSequence]) -> None:
        ends = {entry.sequence.page_table: entry.num_known for entry in entries}
        for row, table in enumerate(self.rows):
            if table is not None and table.row != row:  # it has given up its KV since, and may have begun anew
                self.rows[row] = None
            elif table is not None and table not in ends:
                self._save(table)
                table.leave()
                self.rows[row] = None
        free = [row for row, table in enumerate(self.rows) if table is None]
        length = max(ends.values())
        for table, end in ends.items():
            if table.row is not None and table.start == length - end:
                continue
            if table.row is None:
                table.row = free.pop(0)
                self.rows[table.row] = table
            else:
                self._save(table)
            table.start = length - end
            for pool, context_len in enumerate(table.context_lens):
                self.copied.gather += self._copy(table, pool, 0, context_len, to_row=True)

    @override
    def realign(self, running: SequenceOf[Sequence]) -> None:
        self.rows = [table if table is not None and table.row is not None else None for table in self.rows]
        going_on = {sequence.page_table for sequence in running}
        for table in self.rows:
            if table in going_on:
                self._save(table)

    def _save(self, table: GroupTable) -> None:
        """Copy to the sequence's own cache what its row alone holds."""
        for pool, context_len in enumerate(table.context_lens):
            self.copied.other += self._copy(table, pool, table.num_cached[pool], context_len, to_row=False)
            table.num_cached[pool] = context_len

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

    @override
    def check_integrity(self) -> None:
        for row, table in enumerate(self.rows):
            if table is None or table.row is None:
                continue
            cached, held = table.num_cached, table.context_lens
            if (
                table.row != row
                or cached[TARGET] != held[TARGET]
                or any(c > h for c, h in zip(cached, held, strict=True))
            ):
                raise IntegrityError(
                    f"row {row} is kept for a sequence that has row {table.row}, and {cached} of its {held} tokens in "
                    "a cache of its own"
                )
