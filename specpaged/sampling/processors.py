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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specpaged.sampling.elementwise import exp_fp32, exp_weights
from specpaged.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specpaged.engine.sequence import Sequence as DecodedSequence

_NEG_INF = float("-inf")
_FIRST_WIDTH = 1024  # sorted logits to try before the whole vocabulary is sorted


@dataclass(frozen=True)
class SamplingRequest:
    """One sequence, as values.

    `output_token_ids` are the committed ones and may be the owner's own list; `stop_ids` are eos and stop_token_ids,
    which min_tokens rules out; row j of `token_mask` rules over the row that follows j drafts.
    """

    params: SamplingParams
    seed: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    stop_ids: tuple[int, ...] = ()
    token_mask: Tensor | None = None  # [rows, V] bool, True = allowed
    bad_words_ids: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(
        cls, sequence: DecodedSequence, stop_ids: Iterable[int], bad_words_ids: Iterable[Iterable[int]] = ()
    ) -> SamplingRequest:
        """What a sequence asks for, over its own lists of tokens."""
        return cls(
            params=sequence.params,
            seed=sequence.seed,
            prompt_token_ids=sequence.prompt_token_ids,
            output_token_ids=sequence.output_token_ids,
            stop_ids=tuple(sorted(set(stop_ids))),
            bad_words_ids=tuple(map(tuple, bad_words_ids)),
        )

    @property
    def needs_processing(self) -> bool:
        """Whether any row of this request can differ from its raw logits."""
        params = self.params
        return (
            params.temperature not in (0, 1)
            or self.token_mask is not None
            or params.allowed_token_ids is not None
            or bool(self.bad_words_ids or params.logit_bias)
            or len(self.output_token_ids) < params.min_tokens
            or has_penalties(params)
            or params.min_p > 0
            or params.top_k > 0
            or params.top_p < 1
        )


class Row(NamedTuple):
    """One row of logits: its request, and the drafts of that request that precede the row."""

    request: SamplingRequest
    drafts: Sequence[int]

    @property
    def num_outputs(self) -> int:
        """Output tokens before the one that this row decides: its output index."""
        return len(self.request.output_token_ids) + len(self.drafts)


def has_penalties(params: SamplingParams) -> bool:
    """Whether any of the three penalties is on."""
    return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0


def process_rows(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """[M, V] fp32 -> [M, V] fp32, a new tensor."""
    params = [row.request.params for row in rows]
    out = logits.clone(memory_format=torch.contiguous_format)
    _mask_tokens_(out, rows)
    _add_logit_bias_(out, params)
    _penalise_(out, rows)
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
            kept = out[r, allowed]
            out[r] = _NEG_INF
            out[r, allowed] = kept
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
        if not has_penalties(request.params):
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
            both, place = np.unique(np.concatenate([ids, row.drafts]).astype(np.int64), return_inverse=True)
            count = np.bincount(place, np.concatenate([count, np.ones(len(row.drafts))]), len(both)).astype(np.int64)
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


def keep_top(x: Tensor, top_k: Tensor, top_p: Tensor, first_width: int) -> Tensor:
    """[R, V] fp32, [R] int64 in 1..V, [R] float64 in (0, 1] -> [R, V] fp32: all but each row's top tokens are -inf.

    A token's probability is its weight floor(2^40 e^(x - max)) over the sum of the weights of the top k: integers, so
    that no sum depends on its order. Only values are sorted; ids matter among equals of the last value kept. The
    `first_width` largest are tried before the whole vocabulary is sorted: at least every top_k below V.
    """
    vocab_size = x.shape[1]
    width = min(vocab_size, first_width)
    num_keep, last, decided = _last_kept(x, top_k, top_p, width)
    if width < vocab_size and not bool(decided.all()):
        wide = (~decided).nonzero().squeeze(-1)
        num_keep[wide], last[wide], _ = _last_kept(x[wide], top_k[wide], top_p[wide], vocab_size)
    last = last.unsqueeze(-1)
    above, equal = x > last, x == last
    num_equal = num_keep - above.sum(dim=-1)
    keep = above | (equal & (equal.cumsum(dim=-1) <= num_equal.unsqueeze(-1)))
    return x.masked_fill(~keep, _NEG_INF)


def _last_kept(x: Tensor, top_k: Tensor, top_p: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Per row: how many tokens stay, the value of the last of them, and whether `width` sorted values sufficed."""
    vocab_size = x.shape[1]
    values = x.topk(width, dim=-1).values
    places = torch.arange(width, device=x.device)
    row_max = values[:, :1]
    weights = exp_weights(values, row_max).masked_fill_(places >= top_k.unsqueeze(-1), 0)
    total = weights.sum(dim=-1)
    if width < vocab_size:
        unbounded = top_k > width
        if bool(unbounded.any()):
            total = torch.where(unbounded, exp_weights(x, row_max).sum(dim=-1), total)
    before = weights.cumsum(dim=-1) - weights
    num_top_p = (before.double() < (total.double() * top_p).unsqueeze(-1)).sum(dim=-1)
    num_top_p = torch.where(top_p < 1, num_top_p, vocab_size)
    num_keep = torch.minimum(num_top_p, top_k).clamp_(1)
    decided = (num_keep < width) | (num_keep == top_k) & (top_k <= width) | (width == vocab_size)
    last = values.gather(1, (num_keep - 1).clamp_(max=width - 1).unsqueeze(-1)).squeeze(-1)
    return num_keep, last, decided


def process_row_ref(logits: Tensor, row: Row) -> Tensor:
    """[V] fp32 -> [V] fp32: the same by the book, token by token."""
    request, params = row.request, row.request.params
    vocab_size = logits.shape[0]
    x = logits.clone()
    if bool(x.isnan().any()):
        return torch.full_like(x, float("nan"))
    outputs = [*request.output_token_ids, *row.drafts]
    for v in range(vocab_size):
        if request.token_mask is not None and not request.token_mask[len(row.drafts), v]:
            x[v] = _NEG_INF
        if params.allowed_token_ids is not None and v not in params.allowed_token_ids:
            x[v] = _NEG_INF
    for ids in request.bad_words_ids:
        if outputs[len(outputs) - len(ids) + 1 :] == list(ids[:-1]) and len(ids) - 1 <= len(outputs):
            x[ids[-1]] = _NEG_INF
    if len(outputs) < params.min_tokens:
        for v in request.stop_ids:
            x[v] = _NEG_INF
    for v, bias in (params.logit_bias or {}).items():
        x[v] += bias
    fp32 = torch.tensor([params.repetition_penalty, params.frequency_penalty, params.presence_penalty])
    for v in set(outputs) | set(request.prompt_token_ids):
        x[v] = x[v] / fp32[0] if x[v] > 0 else x[v] * fp32[0]
        x[v] = x[v] - fp32[1] * outputs.count(v)
        if v in outputs:
            x[v] = x[v] - fp32[2]
    if params.temperature > 0:
        x = x / torch.tensor(params.temperature, dtype=torch.float32)
    if params.min_p > 0:
        floor = x.max() + torch.tensor(math.log(params.min_p), dtype=torch.float32)
        x[x < floor] = _NEG_INF
    order = sorted(range(vocab_size), key=lambda v: (-x[v].item(), v))
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1:
        distances = torch.stack([x[v] - x[order[0]] if x[v] != x[order[0]] else torch.tensor(0.0) for v in order])
        weights = [int(weight * 2**40) for weight in exp_fp32(distances).tolist()]
        kept = 1
        while kept < len(order) and float(sum(weights[:kept])) < float(sum(weights)) * params.top_p:
            kept += 1
        order = order[:kept]
    kept_only = torch.full_like(x, _NEG_INF)
    kept_only[order] = x[order]
    return kept_only
