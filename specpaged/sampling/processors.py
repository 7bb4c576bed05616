"""From raw logits to the logits that are sampled from: vLLM's processing, in vLLM's order.

    token mask, allowed_token_ids -> bad_words -> min_tokens -> logit_bias -> penalties (repetition, frequency,
    presence) -> temperature -> min_p -> top_k -> top_p

What is ruled out becomes -inf. A row's result is a function of that row, its request and its history alone; a row that
holds NaN anywhere comes out all NaN. Ties are broken exactly: top_k keeps k tokens and top_p the fewest whose
probability before the last one is below p, in the order (largest logit, lowest id), at least one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specpaged.sampling.request import Row
from specpaged.sampling.top_k_top_p import keep_top
from specpaged.sampling_params import SamplingParams

_NEG_INF = float("-inf")
_FIRST_WIDTH = 1024  # sorted logits to try before the whole vocabulary is sorted


def process_rows(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """[M, V] fp32 -> [M, V] fp32: the processed rows, as a new tensor; `rows` says whose each of the M rows is."""
    params = [row.request.params for row in rows]
    out = logits.clone(memory_format=torch.contiguous_format)
    _edit_(out, rows)
    if any(p.temperature not in (0, 1) for p in params):
        out /= _column(out, [p.temperature or 1.0 for p in params])
    if any(p.min_p > 0 for p in params):
        log_min_p = [math.log(p.min_p) if p.min_p > 0 else _NEG_INF for p in params]
        out.masked_fill_(out < out.amax(dim=-1, keepdim=True) + _column(out, log_min_p), _NEG_INF)
    vocab_size = out.shape[1]
    cut = [r for r, p in enumerate(params) if 0 < p.top_k < vocab_size or p.top_p < 1]
    if cut:
        top_k = torch.tensor([min(params[r].top_k or vocab_size, vocab_size) for r in cut])
        top_p = torch.tensor([params[r].top_p for r in cut], dtype=torch.float64)
        part = slice(None) if len(cut) == len(rows) else torch.tensor(cut, device=out.device)
        width = max(_FIRST_WIDTH, *(int(k) for k in top_k if k < vocab_size), 0)
        out[part] = keep_top(out[part], top_k.to(out.device), top_p.to(out.device), width)
    return out.masked_fill_(logits.amax(dim=-1, keepdim=True).isnan(), float("nan"))


def edit_rows(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """[M, V] fp32 -> [M, V] fp32: the processing of single tokens, up to penalties: all before the temperature.

    The input stays untouched and is itself returned where no row asks for any. A row that holds NaN stays one.
    """
    if not any(row.request.edits_tokens(row.num_outputs) for row in rows):
        return logits
    out = logits.clone(memory_format=torch.contiguous_format)
    _edit_(out, rows)
    is_nan = logits.amax(dim=-1, keepdim=True).isnan()
    return out.masked_fill_(is_nan, float("nan")) if bool(is_nan.any()) else out


def _edit_(out: Tensor, rows: Sequence[Row]) -> None:
    _mask_tokens_(out, rows)
    _add_logit_bias_(out, [row.request.params for row in rows])
    _penalise_(out, rows)


def _column(like: Tensor, values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device).unsqueeze(-1)


def _mask_tokens_(out: Tensor, rows: Sequence[Row]) -> None:
    """Rule out what masks, allowed_token_ids, bad_words and min_tokens forbid."""
    row_idx: list[int] = []
    token_idx: list[int] = []
    for r, row in enumerate(rows):
        request, num_drafts = row.request, len(row.drafts)
        if request.token_mask is not None:
            out[r].masked_fill_(~request.token_mask[num_drafts].to(out.device), _NEG_INF)
        if request.params.allowed_token_ids is not None:
            allowed = torch.tensor(request.params.allowed_token_ids, device=out.device)
            allowed_logits = out[r, allowed]
            out[r] = _NEG_INF
            out[r, allowed] = allowed_logits
        banned = list(_bad_word_ends(row))
        if row.num_outputs < request.params.min_tokens:
            banned += request.stop_ids
        row_idx += [r] * len(banned)
        token_idx += banned
    if row_idx:
        idx = torch.tensor([row_idx, token_idx], device=out.device)
        out[idx[0], idx[1]] = _NEG_INF


def _bad_word_ends(row: Row):
    """Last tokens of the bad words whose other tokens end the output so far."""
    for ids in row.request.bad_words_ids:
        prefix = ids[:-1]
        if not prefix or _tail(row, len(prefix)) == tuple(prefix):
            yield ids[-1]


def _tail(row: Row, count: int) -> tuple[int, ...]:
    """The last `count` output tokens, drafts included; fewer where there are not as many."""
    missing = count - len(row.drafts)
    if missing <= 0:
        return tuple(row.drafts[-count:])
    return (*row.request.output_token_ids[-missing:], *row.drafts)


def _add_logit_bias_(out: Tensor, params: Sequence[SamplingParams]) -> None:
    entries = [(r, token_id, bias) for r, p in enumerate(params) for token_id, bias in (p.logit_bias or {}).items()]
    if entries:
        row_idx, token_idx, bias = zip(*entries, strict=True)
        idx = torch.tensor([row_idx, token_idx], device=out.device)
        out[idx[0], idx[1]] += torch.tensor(bias, dtype=torch.float32, device=out.device)


def _penalise_(out: Tensor, rows: Sequence[Row]) -> None:
    """Penalties of the tokens seen: gathered, changed, scattered back."""
    histories: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    token_idx, counts, row_idx = [], [], []
    for r, row in enumerate(rows):
        request = row.request
        if not request.has_penalties:
            continue
        if id(request) not in histories:
            outputs = Counter(request.output_token_ids)
            seen = set(outputs)
            if request.params.repetition_penalty != 1:
                seen.update(request.prompt_token_ids)
            ids = np.fromiter(seen, np.int64, len(seen))
            histories[id(request)] = ids, np.fromiter((outputs[i] for i in seen), np.int64, len(seen))
        ids, count = histories[id(request)]
        if row.drafts:
            both, both_idx = np.unique(np.concatenate([ids, row.drafts]).astype(np.int64), return_inverse=True)
            count = np.bincount(both_idx, np.concatenate([count, np.ones(len(row.drafts))]), len(both)).astype(np.int64)
            ids = both
        token_idx.append(ids)
        counts.append(count)
        row_idx.append(np.full(len(ids), r))
    if not row_idx:
        return
    row_of, tokens = (torch.from_numpy(np.concatenate(x)).to(out.device) for x in (row_idx, token_idx))
    count = torch.from_numpy(np.concatenate(counts)).to(out.device, torch.float32)

    def values(name: str) -> Tensor:
        column = [getattr(row.request.params, name) for row in rows]
        return torch.tensor(column, dtype=torch.float32, device=out.device)[row_of]

    repetition = values("repetition_penalty")
    x = out[row_of, tokens]
    x = torch.where(x > 0, x / repetition, x * repetition)
    x -= values("frequency_penalty") * count
    x -= values("presence_penalty") * (count > 0)
    out[row_of, tokens] = x
