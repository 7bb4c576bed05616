"""Causal attention of a ragged batch over paged KV: prefill, decode and verify rows in one pass."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def paged_attention_ref(
    query: Tensor,  # [N, Hq, D] dtype
    kv_pool: Tensor,  # [P * S, 2, Hkv, D] dtype; [:, 0] keys, [:, 1] values; holds this pass's tokens already
    page_table: Tensor,  # [B, max_blocks] int64
    cu_query_lens: Tensor,  # [B + 1] int32; N may exceed the last: those rows are filler
    context_lens: Tensor,  # [B] int32, before the pass
    block_size: int,  # S
    scaling: float | None = None,  # default 1 / sqrt(D)
    window: int | None = None,  # a token reads itself and the window - 1 tokens before it
    softcap: float | None = None,  # scores become softcap * tanh(score / softcap)
    sinks: Tensor | None = None,  # [Hq]: a logit in each head's softmax that has no value
) -> Tensor:  # [N, Hq, D] dtype, zeros in filler rows
    """Token t of sequence b, at position p = context_lens[b] + t, reads positions 0 .. p of b and nothing else."""
    num_heads, head_dim = query.shape[1:]
    group = num_heads // kv_pool.shape[2]
    scaling = 1 / math.sqrt(head_dim) if scaling is None else scaling
    output = torch.zeros_like(query)
    bounds = cu_query_lens.tolist()
    for b, context_len in enumerate(context_lens.tolist()):
        for token, row in enumerate(range(bounds[b], bounds[b + 1])):
            position = context_len + token
            first = 0 if window is None else max(0, position - window + 1)
            slots = [
                int(page_table[b, p // block_size]) * block_size + p % block_size for p in range(first, position + 1)
            ]
            for head in range(num_heads):
                keys = kv_pool[slots, 0, head // group].float()  # [position - first + 1, D]
                values = kv_pool[slots, 1, head // group].float()
                scores = keys @ query[row, head].float() * scaling
                if softcap is not None:
                    scores = torch.tanh(scores / softcap) * softcap
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head].float().view(1)])
                weights = torch.softmax(scores, dim=0)
                output[row, head] = (weights[: len(slots)] @ values).to(query.dtype)
    return output
