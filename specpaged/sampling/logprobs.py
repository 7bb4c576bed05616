"""Log-probabilities of raw logits, before any processing: vLLM's default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specpaged.sampling.elementwise import log_softmax_fp32

_CHUNK_ELEMENTS = 2**20


class TokenLogprobs(NamedTuple):
    """One token and the most likely ones in its place."""

    token_id: int
    logprob: float
    rank: int  # tokens at least as likely, itself included: 1 is the most likely (vLLM's definition)
    top: list[tuple[int, float]]  # (token id, logprob), most likely first, of equals the lowest id first


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """[M, V] fp32 and M token ids -> M TokenLogprobs with `num_top` entries in `top` (-1: the whole vocabulary).

    A token id of V or more, as a prompt may hold where an embedding is padded, has a log-probability of -inf.
    """
    vocab_size = logits.shape[1]
    num_top = vocab_size if num_top < 0 else min(num_top, vocab_size)
    rows = max(1, _CHUNK_ELEMENTS // vocab_size)
    result: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), rows):
        logprobs = log_softmax_fp32(logits[start : start + rows])
        ids = token_ids[start : start + rows]
        column = torch.tensor(ids, device=logits.device).unsqueeze(-1)
        chosen = logprobs.gather(1, column.clamp(max=vocab_size - 1)).masked_fill_(column >= vocab_size, float("-inf"))
        ranks = (logprobs >= chosen).sum(dim=-1).tolist()
        for row, token_id, logprob, rank in zip(logprobs, ids, chosen.squeeze(-1).tolist(), ranks, strict=True):
            result.append(TokenLogprobs(token_id, logprob, rank, _top(row, num_top)))
    return result


def _top(logprobs: Tensor, num_top: int) -> list[tuple[int, float]]:
    """The first `num_top` of [V] by (largest value, lowest id)."""
    if num_top == 0:
        return []
    last = logprobs.topk(num_top).values[-1]
    candidates = (logprobs >= last).nonzero().squeeze(-1)  # ids ascending; more than num_top where equals straddle
    values, order = logprobs[candidates].sort(descending=True, stable=True)
    return list(zip(candidates[order[:num_top]].tolist(), values[:num_top].tolist(), strict=True))
