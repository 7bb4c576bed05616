"""Kernelized realignment: rows move in place, in one launch for all layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from typing_extensions import override

from specpaged.modeling.ragged_batch import ints, upload
from specpaged.research.dense import DenseLayout, Move
from specpaged.research.dense_kv_cache import DenseKVCache
from specpaged_kernels.realign import realign


class Compact(DenseLayout):
    """Triton's `realign`: no temporary, and no row is touched that stays."""

    name = "compact"
    copies = 1

    @override
    def move(self, cache: DenseKVCache, moves: Sequence[Move]) -> None:
        slots, lengths, shifts = zip(*moves, strict=True)
        device = cache.layers[0].device
        first = upload(ints(slots), device)
        of_move = upload(ints([*lengths, *shifts], torch.int32), device).view(2, -1)
        for stack in cache.stacks:
            realign(stack, first, *of_move)
