"""The reference of `processors`: the same processing by the book, token by token, in plain Python."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specpaged.sampling.elementwise import exp_fp32
from specpaged.sampling.request import Row

_NEG_INF = float("-inf")


def process_row_ref(logits: Tensor, row: Row) -> Tensor:
    """[V] fp32 -> [V] fp32: what `process_rows` makes of one row, computed token by token."""
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
