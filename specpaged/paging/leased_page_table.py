"""A page table whose blocks belong to somebody else: a serving stack's scheduler lends them. Ints only."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from specpaged.paging.block_allocator import IntegrityError, check_positive
from specpaged.paging.lent_blocks import LentBlocks
from specpaged.paging.page_table import PageTable


class LeasedPageTable(PageTable):
    """Blocks come from outside, and go back when their owner says so: no call here takes or frees one.

    Rollback is the same `truncate` as ever. It keeps the blocks: their owner expects the next tokens in them.

        lend([3, 4, 5])                  |....|....|....|
        advance(TARGET, 10)              |xxxx|xxxx|xx..|
        truncate(TARGET, 7)              |xxxx|xxx.|....|       blocks 3, 4, 5 as before

    All tables of a host count in `lent` who holds which block; whoever ends a sequence counts its blocks out.
    """

    __slots__ = ("num_blocks",)

    def __init__(self, lent: LentBlocks, num_blocks: int, block_size: int, num_pools: int = 1):
        check_positive("num_blocks", num_blocks)
        super().__init__(lent, block_size, num_pools)
        self.num_blocks = num_blocks  # ids are 1 .. num_blocks

    def lend(self, blocks: Sequence[int]) -> None:
        """Append blocks that their owner lends to the sequence. ValueError, and none of them, if one is not there."""
        self._check_blocks(blocks)
        self._allocator.hold(blocks)
        self.blocks.extend(blocks)

    def restart(self, blocks: Sequence[int], context_lens: Sequence[int]) -> None:
        """Replace all blocks by others that hold valid KV of so many tokens in each pool.

        ValueError past their capacity, or for blocks that are not there.
        """
        self._check_blocks(blocks)
        room = len(blocks) * self.block_size
        if len(context_lens) != len(self.context_lens) or not all(0 <= num <= room for num in context_lens):
            raise ValueError(
                f"context_lens must be {len(self.context_lens)} in 0..{room}, the capacity of {len(blocks)} blocks, "
                f"got {list(context_lens)}"
            )
        self._allocator.leave(self.blocks)
        self._allocator.hold(blocks)
        self.blocks = list(blocks)
        self.context_lens = list(context_lens)
        self.num_published = [0] * len(context_lens)

    @override
    def advance(self, pool: int, num_tokens: int) -> None:
        self._check_pool(pool)
        room = self.capacity - self.context_lens[pool]
        if not 0 <= num_tokens <= room:
            raise ValueError(f"num_tokens must be in 0..{room}, the capacity left, got {num_tokens}")
        self.context_lens[pool] += num_tokens

    @override
    def settle(self, context_lens: Sequence[int], num_slots: int = 0) -> int:
        before, room = self.context_lens, len(self.blocks) * self.block_size
        if len(context_lens) != len(before) or min(context_lens) < 0 or max(context_lens) > room:
            raise ValueError(f"context_lens must be {len(before)} in 0..{room}, the capacity, got {list(context_lens)}")
        for pool, context_len in enumerate(context_lens):
            if context_len < self.num_published[pool] * self.block_size:
                self.num_published[pool] = 0
        before[:] = context_lens
        return 0

    @override
    def check_integrity(self) -> None:
        if len(set(self.blocks)) != len(self.blocks):
            raise IntegrityError(f"the page table names a block twice: {self.blocks}")
        for block in self.blocks:
            if not 0 < block <= self.num_blocks:
                raise IntegrityError(f"the page table names block {block}, which does not exist")
        for pool, context_len in enumerate(self.context_lens):
            if not 0 <= context_len <= self.capacity:
                raise IntegrityError(f"pool {pool} has {context_len} valid tokens, capacity {self.capacity}")

    def _check_blocks(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if not 0 < block <= self.num_blocks:
                raise ValueError(f"blocks must be in 1..{self.num_blocks}, got {block!r}")

    @override
    def _drop(self, num_kept: int) -> int:
        return 0
