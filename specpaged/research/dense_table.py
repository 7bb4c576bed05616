"""A sequence's row of a dense batch. Ints only."""

from __future__ import annotations

from specpaged.paging.block_allocator import BlockAllocator
from specpaged.paging.page_table import PageTable


class DenseTable(PageTable):
    """A page table of one block, which is as wide as a whole row.

    The allocator's block says who the sequence is to its KV layout. Where its tokens lie, position 0 in column `start`
    of row `row`, is the layout's to say, once a step is about to write them:

        columns        0 1 2 3 4 5 6 7 8 9
        row 3          . . . x x x x . . .      start 3, context length 4, width 10: entries (33,)
    """

    __slots__ = ("known_end", "row", "start")

    def __init__(self, allocator: BlockAllocator, width: int, num_pools: int):
        super().__init__(allocator, width, num_pools)
        self.row: int | None = None
        self.start: int | None = None
        self.known_end = 0  # the column behind the known tokens of the last step, where its drafts began

    @property
    def entries(self) -> tuple[int]:
        """The slot of position 0, in a KV cache whose blocks are one slot apart."""
        return (self.row * self.block_size + self.start,)

    def reserve(self, num_tokens: int) -> None:
        """A row, if there is none yet; see PageTable.reserve. ValueError past the row's width."""
        if num_tokens > self.block_size:
            raise ValueError(f"num_tokens must be at most {self.block_size}, the width of a row, got {num_tokens}")
        super().reserve(num_tokens)

    def _drop(self, num_kept: int) -> int:
        if num_kept == 0:
            self.row = self.start = None
        return super()._drop(num_kept)
