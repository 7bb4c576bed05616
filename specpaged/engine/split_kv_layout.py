"""Pages of which the draft has its own."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from typing_extensions import override

from specpaged.engine.kv_layout import KVLayout
from specpaged.paging.block_allocator import BlockAllocator
from specpaged.paging.page_table import PageTable
from specpaged.paging.split_page_table import SplitPageTable


class SplitKVLayout(KVLayout):
    """Pages, of which the draft has `num_draft_blocks` of its own: see SplitPageTable for `window`."""

    num_shared_pools = 1

    def __init__(self, tokens_per_block: int, num_draft_blocks: int, window: int | None):
        super().__init__(tokens_per_block)
        self.draft_allocator = BlockAllocator(num_draft_blocks)
        self.window = window

    @override
    def new_table(self, allocator: BlockAllocator, num_pools: int) -> PageTable:
        if num_pools == 1:
            return super().new_table(allocator, num_pools)
        return SplitPageTable(allocator, self.draft_allocator, self.tokens_per_block, self.window)

    @property
    @override
    def num_draft_held(self) -> int:
        return self.draft_allocator.num_held

    @override
    def check_draft_blocks(self, tables: SequenceOf[PageTable]) -> None:
        split = [table.draft for table in tables if isinstance(table, SplitPageTable)]
        self.draft_allocator.check_integrity([table.blocks for table in split])
