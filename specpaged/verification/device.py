"""Verification by the kernels: lists go to the device, and one answer comes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specpaged.sampling.batch import SamplingBatch
from specpaged.sampling.noise import ACCEPT, RECOVER, noise_keys, uniform
from specpaged_kernels.limits import MAX_ROWS

if TYPE_CHECKING:
    from specpaged.drafting.base import DraftOutput

# What accept_matching returns: output token ids, number of accepted drafts, and whether the row behind them is not ok.
Matched = tuple[list[list[int]], list[int], list[bool]]


def fits(drafts: Sequence[Sequence[int]]) -> bool:
    """Whether the kernels take as many drafts of a sequence."""
    return max(map(len, drafts), default=0) < MAX_ROWS


def _packed(drafts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """[B, K] int64, filled up with zeros, and cu_rows [B + 1] int32."""
    width = max(map(len, drafts))
    bounds = [0]
    for draft in drafts:
        bounds.append(bounds[-1] + len(draft) + 1)
    padded = torch.tensor([[*draft, *[0] * (width - len(draft))] for draft in drafts], dtype=torch.int64)
    return padded.to(device), torch.tensor(bounds, dtype=torch.int32).to(device)


def _matched(accepted: Any) -> Matched:
    columns = (accepted.num_outputs, accepted.num_accepted, accepted.ok)
    answer = torch.cat([torch.stack([x.long() for x in columns], 1), accepted.token_ids], 1).tolist()
    token_ids = [row[3 : 3 + row[0]] for row in answer]
    return token_ids, [row[1] for row in answer], [not row[2] for row in answer]


def accept_on_device(logits: Tensor, drafts: Sequence[Sequence[int]], keys: Tensor | None) -> Matched:
    """Greedy and coupled verification of processed logits [M, V] fp32; `keys` are those of SamplingBatch.noise_keys."""
    from specpaged_kernels.accept import accept

    if not drafts:
        return [], [], []
    return _matched(accept(logits, *_packed(drafts, logits.device), keys))


def reject_on_device(
    logits: Tensor,
    draft: DraftOutput,
    sampling: SamplingBatch,
    request_idx: Sequence[int],
    num_drafts_seen: Sequence[int],
) -> Matched:
    """Rejection sampling of processed logits [M, V] fp32."""
    from specpaged_kernels.rejection import reject

    drafts, device = draft.token_ids, logits.device
    seeds = [sampling.requests[i].seed for i in request_idx]
    output_idx = [sampling.output_idx(i, seen) for i, seen in zip(request_idx, num_drafts_seen, strict=True)]
    uniforms = [uniform(seed, t, ACCEPT) for seed, t in zip(seeds, output_idx, strict=True)]
    recover_keys = noise_keys(seeds, output_idx, "cpu", RECOVER).to(device)
    keys = sampling.noise_keys(request_idx, num_drafts_seen)
    return _matched(
        reject(
            logits,
            *_packed(drafts, device),
            _packed_probs(draft, logits),
            torch.tensor(uniforms, dtype=torch.float64).to(device),
            keys,
            recover_keys,
        )
    )


def _packed_probs(draft: DraftOutput, logits: Tensor) -> Tensor | None:
    """[M - B, V] fp32; None if no request brings any. A draft without was certain of its tokens."""
    if all(probs is None for probs in draft.probs):
        return None
    parts = []
    for token_ids, probs in zip(draft.token_ids, draft.probs, strict=True):
        if token_ids and probs is None:
            column = torch.tensor(token_ids, device=logits.device).unsqueeze(-1)
            probs = logits.new_zeros(len(token_ids), logits.shape[1]).scatter_(1, column, 1.0)
        if token_ids:
            parts.append(probs)
    return torch.cat(parts)
