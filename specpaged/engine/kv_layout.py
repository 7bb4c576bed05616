"""How sequences hold KV, and what happens to it when drafts are rejected."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specpaged.paging.block_allocator import BlockAllocator
from specpaged.paging.page_table import PageTable

if TYPE_CHECKING:
    from specpaged.engine.scheduler import ScheduledSequence
    from specpaged.engine.sequence import Sequence
    from specpaged.verification.base import VerifyOutput


@dataclass
class CopiedBytes:
    """Bytes of KV that a layout has written by copying, the target's and the draft's.

    What goes through a temporary counts twice.
    """

    rollback: int = 0  # because drafts were rejected
    gather: int = 0  # so that attention could read it, as one batch
    other: int = 0  # because sequences came or left, or into their own caches: with drafts or without

    @property
    def total(self) -> int:
        """Bytes copied for whatever reason."""
        return self.rollback + self.gather + self.other


class KVLayout:
    """What a layout of KV does in a step. This one is the paged one: page tables are cut, and no KV is copied.

    Other layouts override what they do otherwise. The engine calls `place` before the passes of a step, `limit` behind
    its verification, and `realign` when the page tables have been cut behind what was accepted.
    """

    name = "truncate"
    shares_blocks = True  # between sequences: forks and the prefix cache
    num_shared_pools = 2  # whose KV lies in those blocks: the target's, the draft's

    def __init__(self, tokens_per_block: int):
        self.tokens_per_block = tokens_per_block
        self.copied = CopiedBytes()

    def new_table(self, allocator: BlockAllocator, num_pools: int) -> PageTable:
        """The page table of a sequence that begins."""
        return PageTable(allocator, self.tokens_per_block, num_pools)

    def place(self, entries: SequenceOf[ScheduledSequence]) -> None:
        """Bring the KV of the sequences of a step to where its passes are to find it."""

    def limit(self, verified: VerifyOutput) -> VerifyOutput:
        """The part of a step's output that is to be committed."""
        return verified

    def realign(self, running: SequenceOf[Sequence]) -> None:
        """Bring the KV of all running sequences into the layout's order."""

    @property
    def num_draft_held(self) -> int:
        """Blocks that are the draft's alone, and that sequences hold."""
        return 0

    def check_integrity(self) -> None:
        """IntegrityError where the layout's invariants do not hold."""

    def check_draft_blocks(self, tables: SequenceOf[PageTable]) -> None:
        """IntegrityError unless each block that is the draft's alone is held by one of these tables, which are all."""
