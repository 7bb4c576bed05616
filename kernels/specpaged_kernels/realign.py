"""Moves the KV of a left-padded dense batch to new offsets: what rejecting drafts costs where KV is not paged.

Three sequences after a round that accepted 2, 0 and 1 of its drafts; o: valid, r: rejected, .: padding:

    before  ..ooooo     lengths 5, 2, 4 kept     after  ooooo
            ..oorrr     new length 5                    ...oo
            ..oooor                                     .oooo
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specpaged_kernels.jit import TYPES, Variant, kernel
from specpaged_kernels.limits import DTYPES, HEAD_DIMS

BLOCK_L = 64  # positions of a program


@kernel("cache", "output", "stride_seq", "stride_head", "stride_position")
def _realign_kernel(
    cache, starts, lengths, output, num_heads, new_length, stride_seq, stride_head, stride_position,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.program_id(2) * BLOCK_L + tl.arange(0, BLOCK_L)
    dims = tl.arange(0, BLOCK_D)
    length = tl.load(lengths + seq)
    # Position new_length - length of the result is position starts[seq] of the cache.
    source = position - (new_length - length) + tl.load(starts + seq)
    valid = (position >= new_length - length) & (position < new_length)
    in_head = (dims < HEAD_DIM)[None, :]
    pointers = cache + seq * stride_seq + head * stride_head + source.to(tl.int64)[:, None] * stride_position
    rows = tl.load(pointers + dims[None, :], mask=valid[:, None] & in_head, other=0.0)
    target = ((seq * num_heads + head) * new_length + position)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(output + target, rows, mask=(position < new_length)[:, None] & in_head)


def _constants(head_dim: int) -> dict[str, Any]:
    return {"HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim), "BLOCK_L": BLOCK_L, "num_warps": 4}


def variants() -> Iterator[Variant]:
    """All that `realign` launches for HEAD_DIMS."""
    for dtype in DTYPES:
        types = {name: f"*{TYPES[dtype]}" for name in ("cache", "output")} | {"starts": "*i32", "lengths": "*i32"}
        for head_dim in HEAD_DIMS:
            yield Variant(_realign_kernel, types, _constants(head_dim))


def realign(
    cache: Tensor,  # [B, H, L, D] dtype, D contiguous
    starts: Tensor,  # [B] int32: first valid position of each sequence
    lengths: Tensor,  # [B] int32: how many positions from there are kept
    new_length: int,  # at least the largest of lengths
) -> Tensor:  # [B, H, new_length, D] dtype: each sequence at the right end, zeros before it
    """What `realign_ref` says; every kept element is read once and written once."""
    num_seqs, num_heads, _, head_dim = cache.shape
    output = torch.empty(num_seqs, num_heads, new_length, head_dim, dtype=cache.dtype, device=cache.device)
    _realign_kernel[(num_seqs, num_heads, triton.cdiv(new_length, BLOCK_L))](
        cache, starts, lengths, output, num_heads, new_length, *cache.stride()[:3], **_constants(head_dim)
    )  # fmt: skip
    return output


def realign_ref(cache: Tensor, starts: Tensor, lengths: Tensor, new_length: int) -> Tensor:
    """Each sequence's kept positions, moved to the right end of a fresh tensor."""
    output = cache.new_zeros(*cache.shape[:2], new_length, cache.shape[3])
    for b, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        output[b, :, new_length - length :] = cache[b, :, start : start + length]
    return output
