"""The paper's realignment: unpad, append, repad, row by row."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from specpaged.research.dense import DenseLayout, Move
from specpaged.research.dense_kv_cache import DenseKVCache

CACHED_BYTES = 4 << 20  # a temporary of up to so many is read back from a cache


class Repad(DenseLayout):
    """Each row that moves is taken out without its padding, and written back at its new offset.

    What the round appended is in place behind it already, so that appending is no copy of its own. A short row moves in
    all layers at once, as calls cost more than bytes there; a long one layer by layer.
    """

    name = "repad"

    @override
    def move(self, cache: DenseKVCache, moves: Sequence[Move]) -> None:
        for slot, length, shift in moves:
            for stack in cache.stacks:
                old, new = (stack[:, first : first + length] for first in (slot, slot + shift))
                pairs = zip(old, new, strict=True) if old.nbytes > CACHED_BYTES else [(old, new)]
                for padded, repadded in pairs:
                    repadded.copy_(padded.clone())
