"""Realignment by index: all rows at once, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specpaged.batch import ints, upload
from specpaged.realignment.dense import DenseArm, Move
from specpaged.realignment.dense_kv_cache import DenseKVCache


class Gather(DenseArm):
    """The tokens of all rows that move are gathered by one index, and written back by another one."""

    name = "gather"

    def move(self, cache: DenseKVCache, moves: Sequence[Move]) -> int:
        """See DenseArm."""
        source, destination = source_and_destination(moves, cache.layers[0].device)
        for layer in cache.layers:
            layer.index_copy_(0, destination, layer.index_select(0, source))
        return 2 * len(source)


def source_and_destination(moves: Sequence[Move], device: torch.device) -> tuple[Tensor, Tensor]:
    """[n] int64 each: of every token that moves its slot, before and behind.

    Moves (slot 3, length 2, shift 1) and (slot 14, length 3, shift -2):  3 4 14 15 16  ->  4 5 12 13 14
    """
    lengths = [move.length for move in moves]
    total, first, begins = sum(lengths), 0, []
    for move in moves:
        begins.append(move.slot - first)  # of a move's tokens, their slots' distance from their places in the result
        first += move.length
    table = upload(ints([*begins, *(move.shift for move in moves), *lengths]), device).view(3, -1)
    begin, shift = table[:2].repeat_interleave(table[2], dim=1, output_size=total)
    source = begin + torch.arange(total, device=device)
    return source, source + shift
