"""The paper's realignment: unpad, append, repad, row by row."""

from __future__ import annotations

from collections.abc import Sequence

from specpaged.realignment.dense import DenseArm, Move
from specpaged.realignment.dense_kv_cache import DenseKVCache


class Repad(DenseArm):
    """Each row that moves is taken out without its padding, and written back at its new offset.

    What the round appended is in place behind it already, so that appending is no copy of its own.
    """

    name = "repad"

    def move(self, cache: DenseKVCache, moves: Sequence[Move]) -> int:
        """See DenseArm."""
        for slot, length, shift in moves:
            for stack in cache.stacks:
                unpadded = stack[:, slot : slot + length].clone()
                stack[:, slot + shift : slot + shift + length] = unpadded
        return 2 * sum(move.length for move in moves)
