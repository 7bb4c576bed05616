"""Verification against the target's own samples; greedy is its case without noise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from specpaged.sampling.batch import SamplingBatch
from specpaged.verification.base import VerifyOutput, output_logprobs, verify_rows
from specpaged.verification.device import accept_on_device, fits
from specpaged.verification.greedy import accept_matching

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
        if sampling.backend == "triton" and fits(draft.token_ids):
            keys = sampling.noise_keys(request_idx, num_drafts_seen)
            token_ids, num_accepted, failed = accept_on_device(processed, draft.token_ids, keys)
        else:
            sampled, ok = sampling.sample(processed, request_idx, num_drafts_seen)
            token_ids, num_accepted, failed = accept_matching(draft.token_ids, sampled.tolist(), ok.tolist())
        logprobs = output_logprobs(logits, draft.token_ids, token_ids, sampling)
        return VerifyOutput(token_ids, num_accepted, failed, logprobs)
