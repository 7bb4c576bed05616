"""A draft without a cache, as in the paper's released code."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from typing_extensions import override

from specpaged.engine.kv_layout import KVLayout
from specpaged.engine.scheduler import ScheduledSequence
from specpaged.engine.sequence import Sequence
from specpaged.paging.block_allocator import BlockAllocator
from specpaged.paging.page_table import DRAFT, PageTable
from specpaged.verification.base import VerifyOutput


class Forgetful(KVLayout):
    """Another KV layout that drops the draft's KV after every round, so that the draft runs all known tokens again."""

    def __init__(self, kv_layout: KVLayout):
        super().__init__(kv_layout.tokens_per_block)
        self.kv_layout = kv_layout
        self.name, self.shares_blocks = kv_layout.name, kv_layout.shares_blocks
        self.copied = kv_layout.copied

    @override
    def new_table(self, allocator: BlockAllocator, num_pools: int) -> PageTable:
        return self.kv_layout.new_table(allocator, num_pools)

    @override
    def place(self, entries: SequenceOf[ScheduledSequence]) -> None:
        self.kv_layout.place(entries)

    @override
    def limit(self, verified: VerifyOutput) -> VerifyOutput:
        return self.kv_layout.limit(verified)

    @override
    def realign(self, running: SequenceOf[Sequence]) -> None:
        for sequence in running:
            table = sequence.page_table
            if len(table.context_lens) > DRAFT:
                table.truncate(DRAFT, 0)
        self.kv_layout.realign(running)

    @override
    def check_integrity(self) -> None:
        self.kv_layout.check_integrity()
