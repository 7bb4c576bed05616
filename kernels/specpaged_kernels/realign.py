"""Moves the KV of a left-padded dense batch to new offsets, in place: the cost of rejecting drafts without pages.

Three sequences after a round that accepted 2, 0 and 1 of its drafts; o: valid, r: rejected, .: padding:

    before  ..ooooo     lengths 5, 2, 4 kept     after  ..ooooo     shifts 0, 3, 1
            ..oorrr     all end in column 7             .....oo
            ..oooor                                     ...oooo
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from specpaged_kernels.jit import TYPES, Variant, kernel
from specpaged_kernels.limits import DTYPES

BLOCK_L = 64  # tokens of a step of a program
BLOCK_E = 64  # elements of each of them


@kernel("cache", "num_elements")
def _realign_kernel(
    cache, slots, lengths, shifts, num_slots, num_elements, BLOCK_L: tl.constexpr, BLOCK_E: tl.constexpr
):  # fmt: skip
    move = tl.program_id(0)
    element = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    length = tl.load(lengths + move)
    shift = tl.load(shifts + move)
    first = cache + (tl.program_id(2).to(tl.int64) * num_slots + tl.load(slots + move)) * num_elements
    num_steps = tl.cdiv(length, BLOCK_L)
    for i in range(num_steps):
        # What moves right begins at its right end, so that nothing is written before it has been read.
        step = tl.where(shift > 0, num_steps - 1 - i, i)
        token = step * BLOCK_L + tl.arange(0, BLOCK_L)
        moved = (token < length)[:, None] & (element < num_elements)[None, :]
        pointers = first + token.to(tl.int64)[:, None] * num_elements + element[None, :]
        values = tl.load(pointers, mask=moved)
        tl.debug_barrier()  # all threads have read what one of them may write over
        tl.store(pointers + shift.to(tl.int64) * num_elements, values, mask=moved)


def _constants() -> dict[str, Any]:
    return {"BLOCK_L": BLOCK_L, "BLOCK_E": BLOCK_E, "num_warps": 4, "num_stages": 1}


def variants() -> Iterator[Variant]:
    """All that `realign` launches."""
    for dtype in DTYPES:
        types = {"cache": f"*{TYPES[dtype]}", "slots": "*i64", "lengths": "*i32", "shifts": "*i32"}
        yield Variant(_realign_kernel, types, _constants())


def realign(
    cache: Tensor,  # [layers, slots, 2, Hkv, D] dtype, contiguous; written in place
    slots: Tensor,  # [moves] int64: the first of each move's slots; no two moves touch the same ones
    lengths: Tensor,  # [moves] int32
    shifts: Tensor,  # [moves] int32: slots to the right, or to the left
) -> None:
    """What `realign_ref` does; every element that moves is read once and written once, the others not at all."""
    num_elements = cache[0, 0].numel()
    grid = (len(slots), triton.cdiv(num_elements, BLOCK_E), len(cache))
    _realign_kernel[grid](cache, slots, lengths, shifts, cache.shape[1], num_elements, **_constants())


def realign_ref(cache: Tensor, slots: Tensor, lengths: Tensor, shifts: Tensor) -> None:
    """Slots slots[m] .. slots[m] + lengths[m] - 1 go to shifts[m] slots further on, in every layer."""
    for slot, length, shift in zip(slots.tolist(), lengths.tolist(), shifts.tolist(), strict=True):
        cache[:, slot + shift : slot + shift + length] = cache[:, slot : slot + length].clone()
