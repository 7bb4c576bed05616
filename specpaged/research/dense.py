"""KV layouts whose sequences are rows of one left-padded batch, and what they share: who moves, and where to."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from typing_extensions import override

from specpaged.engine.kv_layout import KVLayout
from specpaged.engine.scheduler import ScheduledSequence
from specpaged.engine.sequence import Sequence
from specpaged.paging.block_allocator import BlockAllocator, IntegrityError
from specpaged.paging.page_table import TARGET
from specpaged.research.alignment import aligned_length
from specpaged.research.dense_kv_cache import DenseKVCache
from specpaged.research.dense_table import DenseTable


class Move(NamedTuple):
    """The valid tokens of a row, in slots slot .. slot + length - 1 of a cache, go `shift` columns to the right."""

    slot: int
    length: int
    shift: int  # negative: to the left


class DenseLayout(KVLayout):
    """Rows of one batch, all ending in the same column; both models' KV has one layout.

    With c_i valid tokens in row i, p_i = start_i columns of padding before them and the common length L:

        I1  p_i + c_i = L for every row that decodes     I2  position j of row i lies in column p_i + j

    A round writes from column L on, and behind it row i has c_i + a_i tokens; `realign` restores I1, for which row i
    moves iff a_i != L' - L. The draft's KV lies in the same columns, a token or two shorter. A row in the middle of its
    prefill is not part of the batch yet: it is placed so that its prompt ends where the others' known tokens do, and
    joins when it has run.

    Moves are there because drafts were rejected, unless the row would have had to move anyway, since others came or
    left: then they are booked as "other".
    """

    shares_blocks = False
    copies = 2  # of a token that moves: through a temporary

    def __init__(self, kv_caches: SequenceOf[DenseKVCache], max_model_len: int):
        super().__init__(kv_caches[TARGET].num_columns)
        self.kv_caches = kv_caches  # the target's, and the draft's if there is one
        self.max_length = max_model_len - 1  # behind which a round writes a known token and the drafts
        self.length = 0  # L
        self.tables: list[DenseTable] = []  # of the rows that decode

    @override
    def new_table(self, allocator: BlockAllocator, num_pools: int) -> DenseTable:
        return DenseTable(allocator, self.tokens_per_block, num_pools)

    @override
    def place(self, entries: SequenceOf[ScheduledSequence]) -> None:
        """The known tokens of a new row will end where the batch ends, or where the longest new row does."""
        new = [entry.sequence for entry in entries if entry.sequence.page_table.start is None]
        if new:
            known = self.length + 1 if self.length else 0
            length = max(known, *(sequence.num_tokens for sequence in new))
            for sequence in new:
                table = sequence.page_table
                table.row = table.blocks[0] - 1
                table.start = length - sequence.num_tokens
        for entry in entries:
            table = entry.sequence.page_table
            table.known_end = table.start + entry.context_len + entry.num_new_tokens

    @override
    def realign(self, running: SequenceOf[Sequence]) -> None:
        """Restore I1."""
        tables = [
            s.page_table
            for s in running
            if s.page_table.start is not None and s.num_tokens - s.page_table.context_lens[TARGET] == 1
        ]
        self.tables, self.length = tables, 0
        if not tables:
            return
        starts = [table.start for table in tables]
        lengths = [table.context_lens[TARGET] for table in tables]
        self.length = aligned_length(starts, lengths, self.max_length)
        shifted = [
            (table, self.length - start - length)
            for table, start, length in zip(tables, starts, lengths, strict=True)
            if start + length != self.length
        ]
        if not shifted:
            return
        # Where all would be aligned had nobody drafted.
        known = [table.known_end - table.start for table in tables]
        without_drafts = aligned_length(starts, known, self.max_length + 1)
        for pool, cache in enumerate(self.kv_caches):
            moves, num_anyway = [], 0
            for table, shift in shifted:
                length = table.context_lens[pool] if pool < len(table.context_lens) else 0
                if length:
                    moves.append(Move(table.entries[0], length, shift))
                    num_anyway += length if table.known_end != without_drafts else 0
            if moves:
                self.move(cache, moves)
                of_token = cache.bytes_per_token * self.copies
                self.copied.rollback += of_token * (sum(move.length for move in moves) - num_anyway)
                self.copied.other += of_token * num_anyway
        for table, shift in shifted:
            table.start += shift

    @abstractmethod
    def move(self, cache: DenseKVCache, moves: SequenceOf[Move]) -> None:
        """Do the moves, which lie in different rows, in every layer."""

    @override
    def check_integrity(self) -> None:
        """IntegrityError unless I1 holds, and every row of the batch is somebody's own."""
        tables = [table for table in self.tables if table.row is not None]  # the others have been aborted
        rows = [table.row for table in tables]
        if len(set(rows)) != len(rows):
            raise IntegrityError(f"rows {rows} are not distinct")
        for table in tables:
            if table.start < 0 or table.start + table.context_lens[TARGET] != self.length:
                raise IntegrityError(
                    f"row {table.row} begins in column {table.start} and holds {table.context_lens[TARGET]} tokens; "
                    f"allowed: an end at {self.length}"
                )
