"""What a round of speculative decoding does between its passes, on the device: the host knows neither tokens nor
lengths.

The state of B sequences is a row each: their tokens, with room for drafts behind the known ones; how many tokens are
known (T), and how many have KV in the draft's pool; how many tokens there may ever be (the limit). A row whose limit is
reached does not run. With at most K = 3 drafts, of sequences A, B, C, of which C has one token to go:

                        A       B       C
    known T             6       9       7           limit  20 20 8
    draft KV            5       7       6
    drafts k            3       3       0           the round's own token is one of those that may still come
    pass 0 runs         5..6    7..9    6..7        the draft, over what it has not seen
    pass 1, 2 run       6..7    9..10   -           the draft, over what it has drafted last
    the target runs     5..9    8..12   6..7
    accepted a          1       3       0
    known T + a + 1     8       13      8           C has reached its limit
    draft KV            7       11      7           T + min(a, k - 1), and never the newest token

Where drafts are selected from (`select_drafts`), the target runs fewer: behind it, k is what it has verified.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specpaged_kernels.jit import Variant, kernel
from specpaged_kernels.limits import MAX_ROWS

BLOCK_B = 64  # sequences of a program
NUM_COUNTS = 5  # in front of the tokens of a row of `settle_round`'s result


@dataclass(frozen=True)
class Rows:
    """The state of B sequences: views of buffers that stay where they are. A row of zeros is nobody's."""

    token_ids: Tensor  # [B, max_model_len] int32
    num_tokens: Tensor  # [B] int32, T: how many of them are known
    draft_context_lens: Tensor  # [B] int32: tokens with KV in the draft's pool, fewer than T
    limits: Tensor  # [B] int32: tokens that there may be in all
    max_drafts: Tensor  # [B] int32: of a round, K at most
    has_draft: Tensor  # [B] int32: 1 where the draft keeps KV of the sequence


class Plan(NamedTuple):
    """What each pass of a round runs: the first K are the draft's, the last one is the target's. See `pack`."""

    num_drafts: Tensor  # [B] int32, k
    starts: Tensor  # [K + 1, B] int32
    ends: Tensor  # [K + 1, B] int32
    num_logits: Tensor  # [K + 1, B] int32


@kernel()
def _plan_kernel(
    num_tokens, draft_context_lens, limits, max_drafts, has_draft,
    num_drafts, starts, ends, num_logits, num_seqs, num_steps, BLOCK_B: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    exists = b < num_seqs
    known = tl.load(num_tokens + b, mask=exists, other=0)
    room = tl.load(limits + b, mask=exists, other=0) - known
    k = tl.minimum(tl.load(max_drafts + b, mask=exists, other=0), room - 1)
    drafting = tl.load(has_draft + b, mask=exists, other=0) != 0
    k = tl.where(drafting, tl.minimum(tl.maximum(k, 0), num_steps), 0)
    tl.store(num_drafts + b, k, mask=exists)
    behind = tl.load(draft_context_lens + b, mask=exists, other=0)
    catches_up = drafting & (room > 0)
    for step in range(num_steps):
        of_step = step * num_seqs + b
        drafts = (k > step).to(tl.int32)
        start, end = known + step - 1, known + step - 1 + drafts
        if step == 0:
            start, end = behind, tl.where(catches_up, known, behind)
        tl.store(starts + of_step, start, mask=exists)
        tl.store(ends + of_step, end, mask=exists)
        tl.store(num_logits + of_step, drafts, mask=exists)
    of_target = num_steps * num_seqs + b
    start = tl.maximum(known - 1, 0)
    num_rows = tl.where(room > 0, k + 1, 0)
    tl.store(starts + of_target, start, mask=exists)
    tl.store(ends + of_target, start + num_rows, mask=exists)
    tl.store(num_logits + of_target, num_rows, mask=exists)


@kernel()
def _store_drafts_kernel(
    sampled, logprobs, cu_logits, num_tokens, token_ids, chances, num_seqs, step, stride_ids, stride_chances,
    BLOCK_B: tl.constexpr, HAS_CHANCES: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    exists = b < num_seqs
    row = tl.load(cu_logits + b, mask=exists, other=0)
    drafts = exists & (tl.load(cu_logits + b + 1, mask=exists, other=0) > row)
    position = b.to(tl.int64) * stride_ids + tl.load(num_tokens + b, mask=exists, other=0) + step
    token_id = tl.load(sampled + row, mask=drafts, other=0)
    tl.store(token_ids + position, token_id.to(tl.int32), mask=drafts)
    if HAS_CHANCES:
        logprob = tl.load(logprobs + row, mask=drafts, other=0.0)
        # A sum never rises with the step: what a rounding leaves above 0 counts as certain, and NaN as impossible.
        logprob = tl.where(logprob == logprob, tl.minimum(logprob, 0.0), float("-inf"))
        of_step = chances + b.to(tl.int64) * stride_chances + step
        if step > 0:
            logprob += tl.load(of_step - 1, mask=drafts, other=0.0)
        tl.store(of_step, logprob, mask=drafts)


@triton.jit
def _mix64(x):
    """SplitMix64's step on uint64: specpaged.sampling.noise._mix64."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@kernel()
def _noise_keys_kernel(
    seeds, draws, num_tokens, num_prompt_tokens, cu_logits, keys, num_seqs, num_rows, step, BLOCK_K: tl.constexpr
):
    """One program per sequence, and one for the filler."""
    b = tl.program_id(0)
    first_row = tl.load(cu_logits + b)
    j = tl.arange(0, BLOCK_K)
    if b == num_seqs:
        for start in range(first_row, num_rows, BLOCK_K):
            row = start + j
            for part in range(4):
                tl.store(keys + row * 4 + part, tl.zeros([BLOCK_K], tl.int32), mask=row < num_rows)
        return
    mask = j < tl.load(cu_logits + b + 1) - first_row
    low = tl.load(seeds + 2 * b).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(seeds + 2 * b + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    output_idx = tl.load(num_tokens + b) - tl.load(num_prompt_tokens + b) + step + j
    key = _mix64(_mix64(_mix64(low | (high << 32))) ^ output_idx.to(tl.uint64))
    pointers = keys + (first_row + j) * 4
    tl.store(pointers, key.to(tl.uint32).to(tl.int32, bitcast=True), mask=mask)
    tl.store(pointers + 1, (key >> 32).to(tl.uint32).to(tl.int32, bitcast=True), mask=mask)
    tl.store(pointers + 2, _mix64(key).to(tl.uint32).to(tl.int32, bitcast=True), mask=mask)
    tl.store(pointers + 3, tl.zeros([BLOCK_K], tl.int32) + tl.load(draws + b), mask=mask)


@kernel()
def _settle_kernel(
    sampled, ok, cu_rows, num_drafts, end_ids, token_ids, num_tokens, draft_context_lens, limits, has_draft, result,
    stride_ids, stride_result, BLOCK_K: tl.constexpr, NUM_COUNTS: tl.constexpr, MAKES_UP: tl.constexpr,
):  # fmt: skip
    """One program per sequence."""
    b = tl.program_id(0)
    first_row = tl.load(cu_rows + b)
    num_rows = tl.load(cu_rows + b + 1) - first_row
    k = num_rows - 1
    known = tl.load(num_tokens + b)
    j = tl.arange(0, BLOCK_K)
    own_ids = token_ids + b.to(tl.int64) * stride_ids + known
    token_id = tl.load(sampled + first_row + j, mask=j < num_rows, other=0).to(tl.int32)
    row_ok = tl.load(ok + first_row + j, mask=j < num_rows, other=0) != 0
    stands = (j < k) & row_ok & (token_id == tl.load(own_ids + j, mask=j < k, other=0))
    accepted = tl.min(tl.where(stands, BLOCK_K, j))
    has_next = tl.sum(tl.where(j == accepted, row_ok.to(tl.int32), 0))  # of a row that does not run, 0
    failed = ((num_rows > 0) & (has_next == 0)).to(tl.int32)
    if MAKES_UP:
        token_id = tl.where((j == accepted) & (failed != 0), tl.load(end_ids + b), token_id)
        has_next += failed
        failed *= 2
    outputs = accepted + has_next
    counts = result + b.to(tl.int64) * stride_result
    tl.store(counts, outputs)
    tl.store(counts + 1, accepted)
    tl.store(counts + 2, tl.maximum(k, 0))
    tl.store(counts + 3, failed)
    tl.store(counts + 4, tl.load(num_drafts + b))
    tl.store(counts + NUM_COUNTS + j, token_id, mask=j < outputs)
    if num_rows > 0:
        tl.store(own_ids + j, token_id, mask=j < outputs)
        tl.store(num_tokens + b, known + outputs)
        if has_next == 0:  # not before the host has seen why
            tl.store(limits + b, known + outputs)
        if tl.load(has_draft + b) != 0:
            seen = known + tl.minimum(accepted, tl.maximum(k - 1, 0))
            tl.store(draft_context_lens + b, tl.minimum(seen, known + outputs - 1))


def _blocks() -> dict[str, Any]:
    return {"BLOCK_B": BLOCK_B, "num_warps": 1}


def _store_constants(has_chances: bool) -> dict[str, Any]:
    return {"BLOCK_B": BLOCK_B, "HAS_CHANCES": has_chances, "num_warps": 1}


def _keys_constants() -> dict[str, Any]:
    return {"BLOCK_K": MAX_ROWS, "num_warps": 1}


def _settle_constants(makes_up: bool) -> dict[str, Any]:
    return {"BLOCK_K": MAX_ROWS, "NUM_COUNTS": NUM_COUNTS, "MAKES_UP": makes_up, "num_warps": 1}


def variants() -> Iterator[Variant]:
    """All that a round launches beside its passes."""
    state = ("token_ids", "num_tokens", "draft_context_lens", "limits", "max_drafts", "has_draft")
    plan = ("num_drafts", "starts", "ends", "num_logits")
    ints = dict.fromkeys((*state, *plan, "cu_logits", "cu_rows", "end_ids", "result"), "*i32")
    keys = dict.fromkeys(("seeds", "draws", "num_tokens", "num_prompt_tokens", "cu_logits", "keys"), "*i32")
    sampled = {"sampled": "*i64", "ok": "*i1", "logprobs": "*fp32", "chances": "*fp32"}

    def of(kernel: Any, types: dict[str, str]) -> dict[str, str]:
        return {name: dtype for name, dtype in types.items() if name in kernel.arg_names}

    yield Variant(_plan_kernel, of(_plan_kernel, ints), _blocks())
    for has_chances in (False, True):
        yield Variant(_store_drafts_kernel, of(_store_drafts_kernel, ints | sampled), _store_constants(has_chances))
    yield Variant(_noise_keys_kernel, keys, _keys_constants())
    for makes_up in (False, True):
        yield Variant(_settle_kernel, of(_settle_kernel, ints | sampled), _settle_constants(makes_up))


def plan_round(rows: Rows, num_steps: int) -> Plan:
    """What `plan_round_ref` says, for at most num_steps = K drafts; nothing waits for the device."""
    num_seqs = len(rows.num_tokens)
    new = {"dtype": torch.int32, "device": rows.num_tokens.device}
    plan = Plan(torch.empty(num_seqs, **new), *(torch.empty(num_steps + 1, num_seqs, **new) for _ in range(3)))
    _plan_kernel[(triton.cdiv(num_seqs, BLOCK_B),)](
        rows.num_tokens, rows.draft_context_lens, rows.limits, rows.max_drafts, rows.has_draft,
        *plan, num_seqs, num_steps, **_blocks(),
    )  # fmt: skip
    return plan


def plan_round_ref(rows: Rows, num_steps: int) -> Plan:
    """As many drafts as are wanted, as long as the target's own token may follow them; see the example above."""
    num_drafts, passes = [], [[] for _ in range(num_steps + 1)]
    of_rows = (rows.num_tokens, rows.draft_context_lens, rows.limits, rows.max_drafts, rows.has_draft)
    for known, behind, limit, most, has_draft in zip(*(x.tolist() for x in of_rows), strict=True):
        room = limit - known
        k = min(max(min(most, room - 1), 0), num_steps) if has_draft else 0
        num_drafts.append(k)
        for step in range(num_steps):
            first = known + step - 1
            run = (behind, known if has_draft and room > 0 else behind) if step == 0 else (first, first + (k > step))
            passes[step].append((*run, int(k > step)))
        start, num_rows = max(known - 1, 0), k + 1 if room > 0 else 0
        passes[num_steps].append((start, start + num_rows, num_rows))
    columns = torch.tensor(passes, dtype=torch.int32).view(num_steps + 1, -1, 3).unbind(-1)
    return Plan(torch.tensor(num_drafts, dtype=torch.int32), *columns)


def store_drafts(
    rows: Rows,
    sampled: Tensor,  # [M] int64: of the draft's pass `step`, a token for each row of logits
    cu_logits: Tensor,  # [B + 1] int32: of that pass, as `pack` gives them
    step: int,
    logprobs: Tensor | None = None,  # [M] float32: of the tokens, to the draft
    chances: Tensor | None = None,  # [B, K] float32: column `step` is written, where there are logprobs
) -> None:
    """What `store_drafts_ref` says; nothing waits for the device."""
    num_seqs, has_chances = len(rows.num_tokens), chances is not None
    unread = torch.empty(0, dtype=torch.float32, device=sampled.device)
    _store_drafts_kernel[(triton.cdiv(num_seqs, BLOCK_B),)](
        sampled, logprobs if has_chances else unread, cu_logits, rows.num_tokens, rows.token_ids,
        chances if has_chances else unread, num_seqs, step, rows.token_ids.stride(0),
        chances.stride(0) if has_chances else 0, **_store_constants(has_chances),
    )  # fmt: skip


def store_drafts_ref(
    rows: Rows,
    sampled: Tensor,
    cu_logits: Tensor,
    step: int,
    logprobs: Tensor | None = None,
    chances: Tensor | None = None,
) -> None:
    """Draft number `step` of each sequence that drafts as many goes behind the known tokens and the drafts before.

    Its chance is the logarithm of how likely the draft takes all of its drafts up to this one: -inf from a NaN on.
    """
    for b, (known, row) in enumerate(zip(rows.num_tokens.tolist(), cu_logits.tolist(), strict=False)):
        if cu_logits[b + 1] > row:
            rows.token_ids[b, known + step] = sampled[row]
            if chances is not None:
                logprob = logprobs[row].clamp(max=0.0).nan_to_num(float("-inf"), neginf=float("-inf"))
                chances[b, step] = logprob + (chances[b, step - 1] if step else 0.0)


def noise_keys(
    rows: Rows,
    seeds: Tensor,  # [B, 2] int32: the low and the high half of a seed of 64 bits
    draws: Tensor,  # [B] int32: whether a sequence's tokens are drawn by chance
    num_prompt_tokens: Tensor,  # [B] int32
    cu_logits: Tensor,  # [B + 1] int32
    num_rows: int,  # M, at least all of them
    step: int,  # drafts that come before a sequence's first row
) -> Tensor:  # [M, 4] int32
    """The keys of each row's noise, and whether it has any: those of `specpaged.sampling.noise.noise_keys` for the
    output index that the row decides. Zeros in filler rows; nothing waits for the device."""
    num_seqs = len(rows.num_tokens)
    keys = torch.empty(num_rows, 4, dtype=torch.int32, device=seeds.device)
    _noise_keys_kernel[(num_seqs + 1,)](
        seeds, draws, rows.num_tokens, num_prompt_tokens, cu_logits, keys, num_seqs, num_rows, step, **_keys_constants()
    )
    return keys


def settle_round(
    rows: Rows,
    sampled: Tensor,  # [M] int64: the target's token of each row that it has run
    ok: Tensor,  # [M] bool: whether the row has one
    cu_rows: Tensor,  # [B + 1] int32
    num_drafts: Tensor,  # [B] int32: made, of which the target has run some
    result: Tensor,  # [B, NUM_COUNTS + K + 1] int32: output tokens, accepted, drafts, whether it failed, made; tokens
    end_ids: Tensor | None = None,  # [B] int32: the token that stands where there is none
) -> None:
    """What `settle_round_ref` says; nothing waits for the device."""
    if result.shape[1] > NUM_COUNTS + MAX_ROWS:
        raise ValueError(f"result has room for {result.shape[1] - NUM_COUNTS} tokens; allowed: {MAX_ROWS}")
    _settle_kernel[(len(rows.num_tokens),)](
        sampled, ok, cu_rows, num_drafts, num_drafts if end_ids is None else end_ids,
        rows.token_ids, rows.num_tokens, rows.draft_context_lens, rows.limits, rows.has_draft, result,
        rows.token_ids.stride(0), result.stride(0), **_settle_constants(end_ids is not None),
    )  # fmt: skip


def settle_round_ref(
    rows: Rows,
    sampled: Tensor,
    ok: Tensor,
    cu_rows: Tensor,
    num_drafts: Tensor,
    result: Tensor,
    end_ids: Tensor | None = None,
) -> None:
    """The longest prefix of drafts that are the target's own tokens, and its next one, become known.

    Lengths are all that rolls back: rejected drafts lie behind them. Where the row behind the accepted drafts has no
    token, the sequence has failed (1), and ends here until somebody raises its limit; or goes on with its end_id (2).
    """
    bounds = cu_rows.tolist()
    for b, (first, last) in enumerate(pairwise(bounds)):
        known, k, accepted = int(rows.num_tokens[b]), last - first - 1, 0
        result[b, :NUM_COUNTS] = 0
        result[b, NUM_COUNTS - 1] = num_drafts[b]
        if last == first:
            continue
        while (
            accepted < k and ok[first + accepted] and sampled[first + accepted] == rows.token_ids[b, known + accepted]
        ):
            accepted += 1
        has_next = bool(ok[first + accepted])
        failed, token_ids = int(not has_next), sampled[first:last].int()
        if failed and end_ids is not None:
            failed, has_next, token_ids[accepted] = 2, True, end_ids[b]
        outputs = accepted + has_next
        result[b, : NUM_COUNTS - 1] = torch.tensor([outputs, accepted, k, failed], dtype=torch.int32)
        result[b, NUM_COUNTS : NUM_COUNTS + outputs] = token_ids[:outputs]
        rows.token_ids[b, known : known + outputs] = token_ids[:outputs]
        rows.num_tokens[b] = known + outputs
        if not has_next:
            rows.limits[b] = known + outputs
        if rows.has_draft[b]:
            rows.draft_context_lens[b] = min(known + min(accepted, max(k - 1, 0)), known + outputs - 1)
