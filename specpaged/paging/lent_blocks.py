"""Blocks that their owner may lend to several sequences: by how many tables each is held. Ints only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from specpaged.paging.block_allocator import IntegrityError


class LentBlocks:
    """Counts what all leased page tables of a host hold, as only one of them may write where nobody else reads."""

    def __init__(self) -> None:
        self._num_holders: Counter[int] = Counter()

    def ref_count(self, block: int) -> int:
        """How many tables hold it."""
        return self._num_holders[block]

    def hold(self, blocks: Sequence[int]) -> None:
        """A table holds these as well."""
        self._num_holders.update(blocks)

    def leave(self, blocks: Sequence[int]) -> None:
        """A table holds these no more."""
        self._num_holders.subtract(blocks)

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """IntegrityError unless these are the blocks of all tables that hold any."""
        expected = Counter(block for blocks in held for block in blocks)
        if +self._num_holders != expected or min(self._num_holders.values(), default=0) < 0:
            raise IntegrityError(f"blocks are held so often: {expected}, and are counted as {self._num_holders}")
