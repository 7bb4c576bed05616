"""Which drafts the target verifies, where there are more than it has rows for: the likeliest of the whole batch.

A chance is the logarithm of how likely the draft takes a token and all of its drafts before it, so it never rises with
depth. A, B, C have made 3, 2, 3 drafts, and the target verifies two for each sequence: six of the eight.

                 A               B           C
    chances     -.1 -.3 -2.1    -.7 -1.9    -.1 -.3 -.6
    places        0   2    7      5    6      1   3   4        in the order of all; of equals, the shorter draft's first
    selected      2               1           3
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from specpaged_kernels.decoding_round import BLOCK_B, Plan
from specpaged_kernels.jit import Variant, kernel
from specpaged_kernels.limits import MAX_ROWS


@kernel()
def _select_kernel(
    num_drafts, chances, starts, num_logits, new_ends, new_num_logits,
    num_seqs, num_steps, num_selected, stride_chances, BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program per sequence: a draft's place in the order of all is the number of those that come before it."""
    b = tl.program_id(0)
    j = tl.arange(0, BLOCK_K)
    own_row = chances + b.to(tl.int64) * stride_chances
    own = tl.load(own_row + j, mask=j < tl.load(num_drafts + b), other=float("-inf"))
    place = tl.zeros([BLOCK_K], tl.int32)
    num_running = 0
    for first in range(0, num_seqs, BLOCK_B):
        other = first + tl.arange(0, BLOCK_B)
        exists = other < num_seqs
        num_running += tl.sum((tl.load(num_logits + other, mask=exists, other=0) > 0).to(tl.int32))
        depth = tl.load(num_drafts + other, mask=exists, other=0)
        for step in range(num_steps):
            theirs = chances + other.to(tl.int64) * stride_chances + step
            chance = tl.load(theirs, mask=exists & (step < depth), other=float("-inf"))[:, None]
            earlier = (step < j)[None, :] | ((step == j)[None, :] & (other < b)[:, None])
            comes_first = (chance > own[None, :]) | ((chance == own[None, :]) & earlier)
            place += tl.sum(comes_first.to(tl.int32), 0)
    is_selected = (own > float("-inf")) & (place < num_running * num_selected)
    count = tl.sum(is_selected.to(tl.int32))
    num_rows = tl.where(tl.load(num_logits + b) > 0, count + 1, 0)
    tl.store(new_ends + b, tl.load(starts + b) + num_rows)
    tl.store(new_num_logits + b, num_rows)


def _select_constants() -> dict[str, Any]:
    return {"BLOCK_B": BLOCK_B, "BLOCK_K": MAX_ROWS, "num_warps": 4}


def variants() -> Iterator[Variant]:
    """All that `select_drafts` launches."""
    names = ("num_drafts", "starts", "num_logits", "new_ends", "new_num_logits")
    yield Variant(_select_kernel, dict.fromkeys(names, "*i32") | {"chances": "*fp32"}, _select_constants())


def select_drafts(
    plan: Plan,
    chances: Tensor,  # [B, K] float32: of the drafts that there are, as `store_drafts` leaves them
    num_selected: int,  # drafts that the target verifies, for each sequence that it runs
) -> tuple[Tensor, Tensor]:  # [B] int32, [B] int32
    """What `select_drafts_ref` says; nothing waits for the device."""
    num_seqs, num_steps = chances.shape
    if num_steps > MAX_ROWS:
        raise ValueError(f"chances is of {num_steps} drafts; allowed: {MAX_ROWS}")
    ends, num_logits = torch.empty(2, num_seqs, dtype=torch.int32, device=chances.device).unbind()
    _select_kernel[(num_seqs,)](
        plan.num_drafts, chances, plan.starts[num_steps], plan.num_logits[num_steps], ends, num_logits,
        num_seqs, num_steps, num_selected, chances.stride(0), **_select_constants(),
    )  # fmt: skip
    return ends, num_logits


def select_drafts_ref(plan: Plan, chances: Tensor, num_selected: int) -> tuple[Tensor, Tensor]:
    """Where the target's pass ends, and how many rows of logits it has, with the likeliest drafts of the whole batch.

    Of n sequences that the target runs it verifies n * num_selected drafts, or all of them (S. Wu et al., "TETRIS",
    2502.15197). As shorter drafts come first of equals, what is selected are the beginnings of drafts. A chance of -inf
    is never selected: the draft has a NaN there.
    """
    num_seqs, num_steps = chances.shape
    depths = plan.num_drafts.tolist()
    order = sorted((-float(chances[b, j]), j, b) for b in range(num_seqs) for j in range(depths[b]))
    runs = plan.num_logits[num_steps] > 0
    counts = [0] * num_seqs
    for minus_chance, _, b in order[: num_selected * int(runs.sum())]:
        counts[b] += minus_chance < float("inf")
    num_logits = torch.where(runs, torch.tensor(counts, dtype=torch.int32) + 1, 0)
    return plan.starts[num_steps] + num_logits, num_logits
