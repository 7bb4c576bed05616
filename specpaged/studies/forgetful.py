"""A draft without a cache, as in the paper's released code."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from specpaged.engine.kv_layout import KVLayout
from specpaged.engine.scheduler import ScheduledSequence
from specpaged.engine.sequence import Sequence
from specpaged.paging.block_allocator import BlockAllocator
from specpaged.paging.page_table import DRAFT, PageTable
from specpaged.verification.base import VerifyOutput


class Forgetful(KVLayout):
    """Another arm, whose sequences lose the draft's KV after every round: it runs all known tokens again."""

    def __init__(self, arm: KVLayout):
        super().__init__(arm.tokens_per_block)
        self.kv_layout = arm
        self.name, self.shares_blocks = arm.name, arm.shares_blocks
        self.copied = arm.copied

    def new_table(self, allocator: BlockAllocator, num_pools: int) -> PageTable:
        """See KVLayout."""
        return self.kv_layout.new_table(allocator, num_pools)

    def place(self, entries: SequenceOf[ScheduledSequence]) -> None:
        """See KVLayout."""
        self.kv_layout.place(entries)

    def limit(self, verified: VerifyOutput) -> VerifyOutput:
        """See KVLayout."""
        return self.kv_layout.limit(verified)

    def realign(self, running: SequenceOf[Sequence]) -> None:
        """See KVLayout."""
        for sequence in running:
            table = sequence.page_table
            if len(table.context_lens) > DRAFT:
                table.truncate(DRAFT, 0)
        self.kv_layout.realign(running)

    def check_integrity(self) -> None:
        """See KVLayout."""
        self.kv_layout.check_integrity()
