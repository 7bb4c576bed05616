"""Classic speculative sampling on the device (Leviathan et al. 2023, arXiv:2211.17192, algorithm 1).

Draft j of a sequence stands with probability min(1, target_j / draft_j). The token after a rejection is drawn from
max(0, target - draft), renormalised; the one after all drafts is the target's own sample. Greedy sequences are matched
exactly. One pass over each row of logits takes its softmax's sums and its own sample, in parts of the vocabulary; a
second pass, over one row per sequence, draws the recovered token:

    row              0       1       2       3        k = 3
    drafts           5       6       7
    target / draft   .8/.4   .1/.3   ...              u = .7, .5, ...: 5 stands, 6 falls
    output           5       v       with v from max(0, target - draft) of row 1
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specpaged_kernels.accept import (
    MAX_PARTS,
    VOCAB_PART,
    Accepted,
    _best,
    _best_of_parts,
    _empty,
    _log,
    _sampled,
    gumbel,
)
from specpaged_kernels.jit import Variant, kernel
from specpaged_kernels.limits import MAX_ROWS

TINY = tl.constexpr(1e-37)  # weights below this are as good as none


@kernel()
def _sums_kernel(
    logits, part_max, part_sum, vocab_size, stride_logits, num_parts, PART: tl.constexpr, BLOCK_V: tl.constexpr
):
    """Per part of a row: the largest logit, and the sum of exp(logit - largest)."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    largest = tl.full([BLOCK_V], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_V], tl.float32)
    for start in range(part * PART, tl.minimum((part + 1) * PART, vocab_size), BLOCK_V):
        ids = start + tl.arange(0, BLOCK_V)
        values = tl.load(logits + row * stride_logits + ids, mask=ids < vocab_size, other=float("-inf"))
        new_largest = tl.maximum(largest, values)
        finite = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        total = total * tl.exp(largest - finite) + tl.exp(values - finite)
        largest = new_largest
    most = tl.max(largest, 0)
    finite = tl.where(most == float("-inf"), 0.0, most)
    tl.store(part_max + row * num_parts + part, most)
    tl.store(part_sum + row * num_parts + part, tl.sum(total * tl.exp(largest - finite), 0))


@triton.jit
def _log_sum(part_max, part_sum, row, num_parts, mask, BLOCK_P: tl.constexpr):
    """log of the sum of exp of rows [R]."""
    parts = tl.arange(0, BLOCK_P)
    pointers = row.to(tl.int64)[:, None] * num_parts + parts[None, :]
    mask = mask[:, None] & (parts < num_parts)[None, :]
    largest = tl.load(part_max + pointers, mask=mask, other=float("-inf"))
    total = tl.load(part_sum + pointers, mask=mask, other=0.0)
    most = tl.max(largest, 1)
    finite = tl.where(most == float("-inf"), 0.0, most)
    return finite + tl.log(tl.sum(total * tl.exp(largest - finite[:, None]), 1))


@kernel()
def _judge_kernel(
    logits, draft_probs, drafts, cu_rows, uniforms, noise_keys, part_values, part_ids, part_max, part_sum,
    token_ids, num_outputs, num_accepted, ok, recovers, log_sums,
    num_parts, stride_logits, stride_probs, stride_drafts, stride_tokens,
    BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr, HAS_PROBS: tl.constexpr,
):  # fmt: skip
    """How many drafts of a sequence stand, and the target's own sample behind them."""
    seq = tl.program_id(0)
    first_row = tl.load(cu_rows + seq)
    k = tl.load(cu_rows + seq + 1) - first_row - 1
    j = tl.arange(0, BLOCK_K)
    row = (first_row + j).to(tl.int64)
    sampled, row_ok = _sampled(part_values, part_ids, row, num_parts, j <= k, BLOCK_P)
    log_sum = _log_sum(part_max, part_sum, row, num_parts, j <= k, BLOCK_P)
    draft = tl.load(drafts + seq * stride_drafts + j, mask=j < k, other=0)
    target = tl.exp(tl.load(logits + row * stride_logits + draft, mask=j < k, other=0.0) - log_sum)
    drafted = tl.full([BLOCK_K], 1.0, tl.float32)
    if HAS_PROBS:  # row j of a sequence is row - seq of draft_probs: it has none for the last
        drafted = tl.load(draft_probs + (row - seq) * stride_probs + draft, mask=j < k, other=1.0)
    uniform = tl.load(uniforms + row, mask=j < k, other=1.0)
    by_chance = uniform * drafted.to(tl.float64) < target.to(tl.float64)
    draws = tl.load(noise_keys + row * 4 + 3, mask=j <= k, other=0) != 0
    stands = (j < k) & row_ok & tl.where(draws, by_chance, sampled == draft.to(tl.int32))
    accepted = tl.min(tl.where(stands, BLOCK_K, j))
    last = j == accepted
    last_ok = tl.sum(tl.where(last, row_ok.to(tl.int32), 0))
    output = tl.where(j < accepted, draft, sampled.to(tl.int64))
    tl.store(token_ids + seq * stride_tokens + j, output, mask=j < accepted + last_ok)
    tl.store(num_outputs + seq, accepted + last_ok)
    tl.store(num_accepted + seq, accepted)
    tl.store(ok + seq, last_ok != 0)
    # Where a draft fell by chance, its place is drawn anew.
    drawn = tl.sum(tl.where(last, draws.to(tl.int32), 0)) * last_ok
    tl.store(recovers + seq, tl.where(accepted < k, drawn, 0))
    tl.store(log_sums + seq, tl.sum(tl.where(last, log_sum, 0.0)))


@kernel()
def _recover_kernel(
    logits, draft_probs, drafts, cu_rows, recover_keys, num_accepted, recovers, log_sums, best_values, best_ids,
    vocab_size, num_parts, stride_logits, stride_probs, stride_drafts,
    PART: tl.constexpr, BLOCK_V: tl.constexpr, HAS_PROBS: tl.constexpr,
):  # fmt: skip
    """Per part of the row after a rejection: the best of log(residual) + noise, and of log(target) + noise."""
    seq = tl.program_id(0)
    part = tl.program_id(1)
    if tl.load(recovers + seq) == 0:
        return
    accepted = tl.load(num_accepted + seq)
    row = (tl.load(cu_rows + seq) + accepted).to(tl.int64)
    draft = tl.load(drafts + seq * stride_drafts + accepted)
    log_sum = tl.load(log_sums + seq)
    key_0 = tl.load(recover_keys + row * 4).to(tl.uint32, bitcast=True)
    key_1 = tl.load(recover_keys + row * 4 + 1).to(tl.uint32, bitcast=True)
    key_2 = tl.load(recover_keys + row * 4 + 2).to(tl.uint32, bitcast=True)
    values = tl.full([2, BLOCK_V], float("-inf"), tl.float32)
    best = tl.full([2, BLOCK_V], 2147483647, tl.int32)
    which = tl.arange(0, 2)[:, None]
    for start in range(part * PART, tl.minimum((part + 1) * PART, vocab_size), BLOCK_V):
        ids = start + tl.arange(0, BLOCK_V)
        mask = ids < vocab_size
        target = tl.exp(tl.load(logits + row * stride_logits + ids, mask=mask, other=float("-inf")) - log_sum)
        if HAS_PROBS:
            drafted = tl.load(draft_probs + (row - seq) * stride_probs + ids, mask=mask, other=0.0)
        else:
            drafted = tl.where(ids == draft, 1.0, 0.0)
        residual = tl.maximum(target - drafted, 0.0)
        weights = tl.where(which == 0, residual[None, :], target[None, :])
        noise = gumbel(ids, key_0, key_1, key_2)
        scores = _log(tl.maximum(weights, TINY)) + noise[None, :]
        scores = tl.where(weights > 0, scores, float("-inf"))
        better = scores > values
        values = tl.where(better, scores, values)
        best = tl.where(better, ids[None, :], best)
    value, token_id = _best(values, best, tl.zeros([2, BLOCK_V], tl.int32), 1)
    pointers = (seq * 2 + tl.arange(0, 2)).to(tl.int64) * num_parts + part
    tl.store(best_values + pointers, value)
    tl.store(best_ids + pointers, token_id)


@kernel()
def _finish_kernel(
    best_values, best_ids, num_accepted, recovers, token_ids, num_parts, stride_tokens, BLOCK_P: tl.constexpr
):
    """Put the recovered token in its place. Rounding can leave no residual: then the target is right."""
    seq = tl.program_id(0)
    if tl.load(recovers + seq) == 0:
        return
    two = tl.arange(0, 2)
    token_id, found = _sampled(best_values, best_ids, seq * 2 + two, num_parts, two < 2, BLOCK_P)
    residual = tl.sum(tl.where(two == 0, found.to(tl.int32), 0))
    chosen = tl.sum(tl.where(two == 1 - residual, token_id, 0))
    tl.store(token_ids + seq * stride_tokens + tl.load(num_accepted + seq), chosen.to(tl.int64))


def _part_constants() -> dict[str, Any]:
    return {"PART": VOCAB_PART, "BLOCK_V": 1024, "num_warps": 8, "enable_fp_fusion": False}


def _judge_constants(has_probs: bool) -> dict[str, Any]:
    return {
        "BLOCK_K": MAX_ROWS,
        "BLOCK_P": MAX_PARTS,
        "HAS_PROBS": has_probs,
        "num_warps": 4,
        "enable_fp_fusion": False,
    }


def _finish_constants() -> dict[str, Any]:
    return {"BLOCK_P": MAX_PARTS, "num_warps": 1}


def variants() -> Iterator[Variant]:
    """All that `reject` launches beside what `accept` does."""
    floats = {name: "*fp32" for name in ("logits", "draft_probs", "part_max", "part_sum", "part_values", "log_sums",
                                         "best_values")}  # fmt: skip
    ints = {name: "*i32" for name in ("cu_rows", "noise_keys", "recover_keys", "part_ids", "num_outputs",
                                      "num_accepted", "recovers", "best_ids")}  # fmt: skip
    types = floats | ints | {"drafts": "*i64", "token_ids": "*i64", "uniforms": "*fp64", "ok": "*i1"}

    def typed(function: Any) -> dict[str, str]:
        return {name: kind for name, kind in types.items() if name in function.arg_names}

    yield Variant(_sums_kernel, typed(_sums_kernel), _part_constants())
    for has_probs in (False, True):
        yield Variant(_judge_kernel, typed(_judge_kernel), _judge_constants(has_probs))
        yield Variant(_recover_kernel, typed(_recover_kernel), _part_constants() | {"HAS_PROBS": has_probs})
    yield Variant(_finish_kernel, typed(_finish_kernel), _finish_constants())


def reject(
    logits: Tensor,  # [M, V] float32, processed
    drafts: Tensor,  # [B, K] int64; sequence b's first cu_rows[b + 1] - cu_rows[b] - 1 count
    cu_rows: Tensor,  # [B + 1] int32: sequence b verifies rows cu_rows[b] .. cu_rows[b + 1] - 1, at least one
    draft_probs: Tensor | None,  # [M - B, V] float32: of every draft's row; None: the draft was certain of its tokens
    uniforms: Tensor,  # [M] float64 in (0, 1): one draw per row
    noise_keys: Tensor,  # [M, 4] int32: keys of the row's sample, and whether it is drawn (else greedy)
    recover_keys: Tensor,  # [M, 4] int32: keys of the token that replaces the row's draft
) -> Accepted:
    """What `reject_ref` says; nothing waits for the device. Contexts are the caller's to truncate."""
    num_seqs, max_drafts = drafts.shape
    if max_drafts >= MAX_ROWS:
        raise ValueError(f"drafts has room for {max_drafts}; allowed: {MAX_ROWS - 1}")
    num_rows, vocab_size = logits.shape
    values, ids = _best_of_parts(logits, noise_keys)
    num_parts, device = values.shape[1], logits.device
    part_max, part_sum = (torch.empty(num_rows, num_parts, dtype=torch.float32, device=device) for _ in range(2))
    _sums_kernel[(num_rows, num_parts)](
        logits, part_max, part_sum, vocab_size, logits.stride(0), num_parts, **_part_constants()
    )
    result = _empty(num_seqs, max_drafts, device, False)
    recovers = torch.empty(num_seqs, dtype=torch.int32, device=device)
    log_sums = torch.empty(num_seqs, dtype=torch.float32, device=device)
    has_probs = draft_probs is not None
    probs = draft_probs if has_probs else logits  # not read then
    _judge_kernel[(num_seqs,)](
        logits, probs, drafts, cu_rows, uniforms, noise_keys, values, ids, part_max, part_sum,
        result.token_ids, result.num_outputs, result.num_accepted, result.ok, recovers, log_sums,
        num_parts, logits.stride(0), probs.stride(0), drafts.stride(0), result.token_ids.stride(0),
        **_judge_constants(has_probs),
    )  # fmt: skip
    best_values = torch.empty(num_seqs * 2, num_parts, dtype=torch.float32, device=device)
    best_ids = torch.empty(num_seqs * 2, num_parts, dtype=torch.int32, device=device)
    _recover_kernel[(num_seqs, num_parts)](
        logits, probs, drafts, cu_rows, recover_keys, result.num_accepted, recovers, log_sums, best_values, best_ids,
        vocab_size, num_parts, logits.stride(0), probs.stride(0), drafts.stride(0),
        **_part_constants(), HAS_PROBS=has_probs,
    )  # fmt: skip
    _finish_kernel[(num_seqs,)](
        best_values, best_ids, result.num_accepted, recovers, result.token_ids, num_parts, result.token_ids.stride(0),
        **_finish_constants(),
    )  # fmt: skip
    return result


def reject_ref(
    logits: Tensor,
    drafts: Tensor,
    cu_rows: Tensor,
    draft_probs: Tensor | None,
    uniforms: Tensor,
    noise: Tensor,  # [M, V] float32: the noise of the row's sample; zeros where it is greedy
    draws: Tensor,  # [M] bool: whether the row is drawn
    recover_noise: Tensor,  # [M, V] float32
) -> Accepted:
    """Sequence by sequence, draft by draft."""
    result = _empty(*drafts.shape, logits.device, False)
    values, sampled = (logits + noise).max(dim=-1)
    probs = torch.softmax(logits, dim=-1)
    bounds = cu_rows.tolist()
    for b in range(len(drafts)):
        first, k = bounds[b], bounds[b + 1] - bounds[b] - 1

        def draft_row(j: int, b: int = b, first: int = first) -> Tensor:
            if draft_probs is None:
                return torch.nn.functional.one_hot(drafts[b, j], logits.shape[1]).float()
            return draft_probs[first - b + j]

        accepted, recovers = 0, False
        while accepted < k and values[first + accepted] > float("-inf"):
            row, draft = first + accepted, int(drafts[b, accepted])
            if draws[row]:
                stands = float(uniforms[row]) * float(draft_row(accepted)[draft]) < float(probs[row, draft])
            else:
                stands = int(sampled[row]) == draft
            if not stands:
                recovers = bool(draws[row])
                break
            accepted += 1
        row = first + accepted
        ok = bool(values[row] > float("-inf"))
        tokens = drafts[b, :accepted].tolist()
        if ok and recovers:
            weights = (probs[row] - draft_row(accepted)).clamp(min=0)
            weights = weights if weights.max() > 0 else probs[row]
            scores = weights.clamp(min=TINY.value).log().masked_fill(weights == 0, float("-inf"))
            tokens.append(int((scores + recover_noise[row]).argmax()))
        elif ok:
            tokens.append(int(sampled[row]))
        result.token_ids[b, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        result.num_outputs[b], result.num_accepted[b], result.ok[b] = len(tokens), accepted, ok
    return result
