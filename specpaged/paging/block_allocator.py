"""The owner of every block id: reference counts, the free list, the LRU of cached blocks nobody owns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

NULL_BLOCK = 0


class OutOfBlocksError(RuntimeError):
    """More blocks are wanted than are free. Whoever raises it has changed nothing."""


class IntegrityError(RuntimeError):
    """An owner of state found that its own invariants do not hold."""


def check_positive(name: str, value: int) -> None:
    """ValueError unless value is an int >= 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be an int >= 1, got {value!r}")


class BlockAllocator:
    """Hands out block ids 1..num_blocks; block 0 is the null block and belongs to nobody.

    Every block is in one of three states:

        owners  cached      where it is            counts as
        0       no          free list              free
        0       yes         LRU, still findable    free
        > 0     yes or no   page tables            held

    A prefix cache marks blocks as cached. When a cached block's last owner leaves, the block goes to the LRU
    in place of the free list; `allocate` takes from the LRU, oldest first, only when the free list is empty.
    `on_uncache` is told of every block that ceases to be cached, before it is handed out or written.
    """

    __slots__ = ("_cached", "_free", "_lru", "_ref_counts", "num_blocks", "on_uncache")

    def __init__(self, num_blocks: int):
        check_positive("num_blocks", num_blocks)
        self.num_blocks = num_blocks
        self.on_uncache: Callable[[int], None] | None = None
        self._ref_counts = [0] * (num_blocks + 1)
        self._cached = bytearray(num_blocks + 1)
        self._free = list(range(num_blocks, 0, -1))  # a stack: low ids come first
        self._lru: dict[int, None] = {}  # in the order in which they lost their last owner

    @property
    def num_free(self) -> int:
        """Blocks without an owner, cached ones among them. O(1)."""
        return len(self._free) + len(self._lru)

    @property
    def num_held(self) -> int:
        """Blocks with at least one owner. O(1)."""
        return self.num_blocks - len(self._free) - len(self._lru)

    def allocate(self) -> int:
        """A block with one owner. O(1). OutOfBlocksError when none is free."""
        if self._free:
            block = self._free.pop()
        elif self._lru:
            self.uncache(next(iter(self._lru)))
            block = self._free.pop()
        else:
            raise OutOfBlocksError(f"no block is free: all {self.num_blocks} have an owner")
        self._ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more owner for a block that has at least one."""
        if self.ref_count(block) == 0:
            raise ValueError(f"block {block} has no owner; only an allocated block can be shared")
        self._ref_counts[block] += 1

    def free(self, block: int) -> None:
        """One owner less; the last one makes the block free. O(1)."""
        refs = self._ref_counts[block] if 0 < block <= self.num_blocks else self.ref_count(block)
        if refs == 0:
            raise ValueError(f"block {block} has no owner (double free?); only an allocated block can be freed")
        self._ref_counts[block] = refs - 1
        if refs == 1:
            if self._cached[block]:
                self._lru[block] = None
            else:
                self._free.append(block)

    def ref_count(self, block: int) -> int:
        """Owners of the block; 0 = free."""
        if not 0 < block <= self.num_blocks:
            raise ValueError(f"block must be in 1..{self.num_blocks}, got {block!r}")
        return self._ref_counts[block]

    def is_cached(self, block: int) -> bool:
        """Whether a prefix cache can find the block, owned or not."""
        self.ref_count(block)
        return bool(self._cached[block])

    def mark_cached(self, block: int) -> None:
        """Keep an owned block's contents after its last owner has left, until its space is needed."""
        if self.ref_count(block) == 0:
            raise ValueError(f"block {block} has no owner; only an allocated block can be cached")
        self._cached[block] = 1

    def claim_cached(self, block: int) -> None:
        """One more owner for a cached block, which may have none."""
        if not self.is_cached(block):
            raise ValueError(f"block {block} is not cached; only a cached block can be claimed")
        self._lru.pop(block, None)
        self._ref_counts[block] += 1

    def uncache(self, block: int) -> None:
        """The block's contents are about to change: it stops being findable. Owners keep it."""
        if not self.is_cached(block):
            raise ValueError(f"block {block} is not cached; only a cached block can be uncached")
        self._cached[block] = 0
        if block in self._lru:
            del self._lru[block]
            self._free.append(block)
        if self.on_uncache is not None:
            self.on_uncache(block)

    def check_writable(self, blocks: Sequence[int]) -> list[int]:
        """The cached ones of blocks whose one owner is about to write them; he must uncache them first.

        ValueError if one of the blocks has several owners.
        """
        ref_counts, cached = self._ref_counts, self._cached
        stale = []
        for block in blocks:
            if ref_counts[block] > 1:
                raise ValueError(
                    "appending into a block with more than one owner is impossible: "
                    f"block {block} has {ref_counts[block]}; fork() makes a copy to append to"
                )
            if cached[block]:
                stale.append(block)
        return stale

    def check_integrity(self, owners: Iterable[Iterable[int]] | None = None) -> None:
        """IntegrityError unless free + held == total and every block is in exactly one state.

        With `owners`, the blocks of every owner there is, the ref counts must also equal the owners' uses.
        """
        free, lru = self._free, self._lru
        if self._ref_counts[NULL_BLOCK] or self._cached[NULL_BLOCK] or NULL_BLOCK in free or NULL_BLOCK in lru:
            raise IntegrityError("the null block is owned, cached or free; it must stay outside the pool")
        if len(set(free)) != len(free):
            raise IntegrityError(f"the free list holds a block twice: {sorted(free)}")
        unowned = set(free) | lru.keys()
        num_held = 0
        for block in range(1, self.num_blocks + 1):
            refs = self._ref_counts[block]
            num_held += refs > 0
            if refs < 0:
                raise IntegrityError(f"block {block} has a ref count of {refs}")
            if (refs == 0) != (block in unowned):
                raise IntegrityError(f"block {block} has {refs} owners but is {'' if refs else 'not '}free")
            if refs == 0 and (block in lru) != bool(self._cached[block]):
                place = "LRU" if block in lru else "free list"
                raise IntegrityError(f"block {block} lies in the {place}, cached = {bool(self._cached[block])}")
        if self.num_free + num_held != self.num_blocks:
            raise IntegrityError(f"free {self.num_free} + held {num_held} is not the total {self.num_blocks}")
        if owners is not None:
            uses = Counter(block for blocks in owners for block in blocks)
            for block in {*range(1, self.num_blocks + 1), *uses}:
                refs = self._ref_counts[block] if 0 < block <= self.num_blocks else 0
                if refs != uses[block]:
                    raise IntegrityError(f"block {block} has a ref count of {refs} but {uses[block]} owners")
