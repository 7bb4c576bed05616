"""Verification against the target's own samples; greedy is its case without noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specpaged.sampling.batch import SamplingBatch
from specpaged.verification.base import VerifyOutput, output_logprobs, verify_rows
from specpaged.verification.greedy import accept_matching
from specpaged_kernels.limits import MAX_ROWS

if TYPE_CHECKING:
    from specpaged.drafting.base import DraftOutput


class CoupledVerifier:
    """A draft stands iff it is the token that the target samples in its place.

    The target's sample is a function of its logits, the request and the output index alone, so the output is that of
    plain decoding, whatever was drafted. Serves "greedy" too.
    """

    def __init__(self, name: str = "coupled"):
        self.name = name

    def verify(self, logits: Tensor, draft: DraftOutput, sampling: SamplingBatch) -> VerifyOutput:
        """See Verifier.verify."""
        request_idx, num_drafts_seen = verify_rows(draft.token_ids)
        processed = sampling.process(logits, request_idx, num_drafts_seen, draft.token_ids)
        if sampling.backend == "triton" and max(map(len, draft.token_ids), default=0) < MAX_ROWS:
            keys = sampling.noise_keys(request_idx, num_drafts_seen)
            token_ids, num_accepted, failed = _accept_on_device(processed, draft.token_ids, keys)
        else:
            sampled, ok = sampling.sample(processed, request_idx, num_drafts_seen)
            token_ids, num_accepted, failed = accept_matching(draft.token_ids, sampled.tolist(), ok.tolist())
        logprobs = output_logprobs(logits, draft.token_ids, token_ids, sampling)
        return VerifyOutput(token_ids, num_accepted, failed, logprobs)


def _accept_on_device(
    logits: Tensor, drafts: Sequence[Sequence[int]], noise_keys: Tensor | None
) -> tuple[list[list[int]], list[int], list[bool]]:
    """As accept_matching, from logits [M, V]: one reading of them, and one answer to wait for."""
    from specpaged_kernels.accept import accept

    if not drafts:
        return [], [], []
    counts = [len(draft) for draft in drafts]
    width = max(counts)
    bounds = [0]
    for count in counts:
        bounds.append(bounds[-1] + count + 1)
    padded = torch.tensor([[*draft, *[0] * (width - len(draft))] for draft in drafts], dtype=torch.int64)
    cu_rows = torch.tensor(bounds, dtype=torch.int32)
    accepted = accept(logits, padded.to(logits.device), cu_rows.to(logits.device), noise_keys)
    columns = (accepted.num_outputs, accepted.num_accepted, accepted.ok)
    answer = torch.cat([torch.stack([x.long() for x in columns], 1), accepted.token_ids], 1).tolist()
    token_ids = [row[3 : 3 + row[0]] for row in answer]
    return token_ids, [row[1] for row in answer], [not row[2] for row in answer]
