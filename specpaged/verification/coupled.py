"""Verification against the target's own samples; greedy is its case without noise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from specpaged.sampling.batch import SamplingBatch
from specpaged.verification.base import Matched, Verifier, VerifyRows
from specpaged.verification.greedy import accept_matching

if TYPE_CHECKING:
    from specpaged.drafting.base import DraftOutput


class CoupledVerifier(Verifier):
    """A draft stands iff it is the token that the target samples in its place.

    The target's sample is a function of its logits, the request and the output index alone, so the output is that of
    plain decoding, whatever was drafted. Serves "greedy" too.
    """

    def __init__(self, name: str = "coupled"):
        self.name = name

    @override
    def match(self, rows: VerifyRows, draft: DraftOutput, sampling: SamplingBatch) -> Matched:
        chosen = sampling.choose(rows.logits, rows.request_idx, rows.num_drafts_seen, draft.token_ids)
        return accept_matching(draft.token_ids, chosen.token_ids.tolist(), chosen.ok.tolist())
