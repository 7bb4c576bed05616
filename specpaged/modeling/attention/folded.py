"""Attention over gathered KV in plain torch: SDPA with the heads of a group folded into rows, and a chunked form.

Both take a group of G sequences:
    query    [G, Hkv, R, D]  R folded rows: query token t and head h of the Hq/Hkv heads of a group at t * (Hq/Hkv) + h
    keys     [G, Hkv, L, D]  positions 0 .. L-1 of each sequence, zeros past its length
    values   [G, Hkv, L, D]
    hidden   [G, 1, R, L]    additive float mask: 0 where row may read position, -inf elsewhere
and return [G, Hkv, R, D].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Softmax sums and P.V are formed per this many absolute positions, then merged in order of position.
CHUNK = 64


def attend_sdpa(query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, scaling: float | None) -> Tensor:
    """Bits depend on R and on L where the CPU's matrix kernels do: which of them are equal is for the probe to say."""
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=hidden, scale=scaling)


def attend_chunked(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    hidden: Tensor,
    scaling: float | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [Hkv, R] float32: the logit of each row's sink
) -> Tensor:
    """In float32; L must be a multiple of CHUNK. A row's bits depend on its own positions alone: a chunk that it may
    not read adds exact zeros."""
    num_seqs, num_kv_heads, rows, head_dim = query.shape
    length = keys.shape[2]
    chunks = length // CHUNK
    scaling = head_dim**-0.5 if scaling is None else scaling
    # [G * Hkv, L, D] each
    keys = keys.reshape(-1, length, head_dim).float()
    values = values.reshape(-1, CHUNK, head_dim).float()
    scores = torch.bmm(query.reshape(-1, rows, head_dim).float(), keys.transpose(1, 2)) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.view(num_seqs, num_kv_heads, rows, length) + hidden
    # [G, Hkv, chunks, R, CHUNK]
    scores = scores.view(num_seqs, num_kv_heads, rows, chunks, CHUNK).transpose(2, 3)
    # Finite where a chunk is hidden as a whole, so that its weight becomes 0 and not NaN.
    chunk_max = scores.amax(dim=-1, keepdim=True).clamp(min=-1e30)
    total_max = chunk_max.amax(dim=2, keepdim=True)
    if sinks is not None:
        sinks = sinks.reshape(1, num_kv_heads, 1, rows, 1)
        total_max = torch.maximum(total_max, sinks)
    weights = torch.exp(scores - chunk_max).contiguous()
    sums = weights.sum(dim=-1, keepdim=True)
    outputs = torch.bmm(weights.view(-1, rows, CHUNK), values).view(num_seqs, num_kv_heads, chunks, rows, head_dim)
    chunk_weights = torch.exp(chunk_max - total_max)
    sums, outputs = sums * chunk_weights, outputs * chunk_weights
    denominator, output = sums[:, :, 0], outputs[:, :, 0]
    for chunk in range(1, chunks):
        denominator = denominator + sums[:, :, chunk]
        output = output + outputs[:, :, chunk]
    if sinks is not None:
        denominator = denominator + torch.exp(sinks - total_max)[:, :, 0]
    return (output / denominator).to(query.dtype)
