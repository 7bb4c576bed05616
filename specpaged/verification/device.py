"""The verifiers by the kernels: drafts go to the device, and one answer comes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from specpaged.sampling.batch import SamplingBatch
from specpaged.sampling.noise import ACCEPT, RECOVER, noise_keys, uniform
from specpaged.verification.base import Matched, VerifyRows
from specpaged.verification.coupled import CoupledVerifier
from specpaged.verification.rejection import RejectionVerifier
from specpaged_kernels.accept import Accepted, accept
from specpaged_kernels.limits import MAX_ROWS
from specpaged_kernels.rejection import reject

if TYPE_CHECKING:
    from specpaged.drafting.base import DraftOutput


class KernelCoupledVerifier(CoupledVerifier):
    """CoupledVerifier in one reading of the logits. More drafts of a sequence than the kernel takes are torch's."""

    @override
    def match(self, rows: VerifyRows, draft: DraftOutput, sampling: SamplingBatch) -> Matched:
        if not _fits(draft.token_ids):
            return super().match(rows, draft, sampling)
        keys = sampling.noise_keys(rows.request_idx, rows.num_drafts_seen)
        return _matched(accept(rows.processed(draft, sampling), *_packed(draft.token_ids, rows.logits.device), keys))


class KernelRejectionVerifier(RejectionVerifier):
    """RejectionVerifier on the device; greedy batches, and more drafts than the kernel takes, are torch's."""

    @override
    def match(self, rows: VerifyRows, draft: DraftOutput, sampling: SamplingBatch) -> Matched:
        if sampling.all_greedy or not _fits(draft.token_ids):
            return super().match(rows, draft, sampling)
        processed, device = rows.processed(draft, sampling), rows.logits.device
        seeds = [sampling.requests[i].seed for i in rows.request_idx]
        output_idx = list(map(sampling.output_idx, rows.request_idx, rows.num_drafts_seen))
        uniforms = [uniform(seed, t, ACCEPT) for seed, t in zip(seeds, output_idx, strict=True)]
        return _matched(
            reject(
                processed,
                *_packed(draft.token_ids, device),
                _packed_probs(draft, processed),
                torch.tensor(uniforms, dtype=torch.float64).to(device),
                sampling.noise_keys(rows.request_idx, rows.num_drafts_seen),
                noise_keys(seeds, output_idx, "cpu", RECOVER).to(device),
            )
        )


def _fits(drafts: Sequence[Sequence[int]]) -> bool:
    """Whether there is something to verify, and the kernels have room for it."""
    return len(drafts) > 0 and max(map(len, drafts)) < MAX_ROWS


def _packed(drafts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """[B, K] int64, filled up with zeros, and cu_rows [B + 1] int32."""
    width = max(map(len, drafts))
    bounds = [0]
    for draft in drafts:
        bounds.append(bounds[-1] + len(draft) + 1)
    padded = torch.tensor([[*draft, *[0] * (width - len(draft))] for draft in drafts], dtype=torch.int64)
    return padded.to(device), torch.tensor(bounds, dtype=torch.int32).to(device)


def _matched(accepted: Accepted) -> Matched:
    columns = (accepted.num_outputs, accepted.num_accepted, accepted.ok)
    answer = torch.cat([torch.stack([x.long() for x in columns], 1), accepted.token_ids], 1).tolist()
    token_ids = [row[3 : 3 + row[0]] for row in answer]
    return token_ids, [row[1] for row in answer], [not row[2] for row in answer]


def _packed_probs(draft: DraftOutput, logits: Tensor) -> Tensor | None:
    """[M - B, V] fp32; None if no request brings any. A draft without was certain of its tokens."""
    if all(probs is None for probs in draft.probs):
        return None
    rows_of_drafts = []
    for token_ids, probs in zip(draft.token_ids, draft.probs, strict=True):
        if token_ids and probs is None:
            column = torch.tensor(token_ids, device=logits.device).unsqueeze(-1)
            probs = logits.new_zeros(len(token_ids), logits.shape[1]).scatter_(1, column, 1.0)
        if token_ids:
            rows_of_drafts.append(probs)
    return torch.cat(rows_of_drafts)
