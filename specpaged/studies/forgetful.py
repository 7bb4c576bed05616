"""A draft without a cache, as in the paper's released code."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from specpaged.paging.block_allocator import BlockAllocator
from specpaged.paging.page_table import DRAFT, PageTable
from specpaged.realignment.base import Arm
from specpaged.scheduling.base import ScheduledSequence
from specpaged.sequence import Sequence
from specpaged.verification.base import VerifyOutput


class Forgetful(Arm):
    """Another arm, whose sequences lose the draft's KV after every round: it runs all known tokens again."""

    def __init__(self, arm: Arm):
        super().__init__(arm.tokens_per_block)
        self.arm = arm
        self.name, self.shares_blocks = arm.name, arm.shares_blocks
        self.copied = arm.copied

    def new_table(self, allocator: BlockAllocator, num_pools: int) -> PageTable:
        """See Arm."""
        return self.arm.new_table(allocator, num_pools)

    def place(self, entries: SequenceOf[ScheduledSequence]) -> None:
        """See Arm."""
        self.arm.place(entries)

    def limit(self, verified: VerifyOutput) -> VerifyOutput:
        """See Arm."""
        return self.arm.limit(verified)

    def realign(self, running: SequenceOf[Sequence]) -> None:
        """See Arm."""
        for sequence in running:
            table = sequence.page_table
            if len(table.context_lens) > DRAFT:
                table.truncate(DRAFT, 0)
        self.arm.realign(running)

    def check_integrity(self) -> None:
        """See Arm."""
        self.arm.check_integrity()
