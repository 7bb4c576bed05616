"""Realignment by index: all rows at once, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from specpaged.modeling.ragged_batch import ints, upload
from specpaged.research.dense import DenseLayout, Move
from specpaged.research.dense_kv_cache import DenseKVCache


class Gather(DenseLayout):
    """The tokens of all rows that move are gathered by one index, and written back by another one."""

    name = "gather"

    def __init__(self, kv_caches: Sequence[DenseKVCache], max_model_len: int):
        super().__init__(kv_caches, max_model_len)
        self._scratch: dict[tuple[torch.Size, torch.dtype], Tensor] = {}

    @override
    def move(self, cache: DenseKVCache, moves: Sequence[Move]) -> None:
        source, destination = source_and_destination(moves, cache.layers[0].device)
        for layer in cache.layers:
            gathered = self._room(len(source), layer)
            torch.index_select(layer, 0, source, out=gathered)
            layer.index_copy_(0, destination, gathered)

    def _room(self, num_tokens: int, layer: Tensor) -> Tensor:
        """[num_tokens, 2, Hkv, D]: memory that is kept, as new pages of it would cost more than the copy."""
        key = (layer.shape[1:], layer.dtype)
        if key not in self._scratch or len(self._scratch[key]) < num_tokens:
            self._scratch[key] = layer.new_empty(num_tokens, *layer.shape[1:])
        return self._scratch[key][:num_tokens]


def source_and_destination(moves: Sequence[Move], device: torch.device) -> tuple[Tensor, Tensor]:
    """[n] int64 each: the slots of every token that moves, before and after the move.

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
