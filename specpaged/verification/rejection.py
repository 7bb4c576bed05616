"""Classic speculative sampling (Leviathan et al. 2023, arXiv:2211.17192).

It keeps the target's distribution, not its samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specpaged.sampling.batch import SamplingBatch
from specpaged.sampling.noise import ACCEPT, RECOVER, gumbel_noise, uniform
from specpaged.sampling.processors import SamplingRequest
from specpaged.verification.base import VerifyOutput, output_logprobs, verify_rows
from specpaged.verification.greedy import accept_matching

if TYPE_CHECKING:
    from specpaged.drafting.base import DraftOutput


class RejectionVerifier:
    """A draft d stands with probability min(1, target(d) / draft(d)), both after processing.

    The token after a rejection is *recovered*: drawn from max(0, target - draft), renormalised. The one after
    all drafts is the target's sample. Each draw is a function of (seed, output index, purpose), so a run can be
    repeated; unlike coupled verification, the output depends on the drafts. Greedy requests are matched exactly.
    """

    name = "rejection"

    def verify(self, logits: Tensor, draft: DraftOutput, sampling: SamplingBatch) -> VerifyOutput:
        """See Verifier.verify. A draft without probabilities (`draft.probs[i]` is None) was certain of its tokens."""
        drafts = draft.token_ids
        request_idx, num_drafts_seen = verify_rows(drafts)
        processed = sampling.process(logits, request_idx, num_drafts_seen, drafts)
        sampled, ok = (x.tolist() for x in sampling.sample(processed, request_idx, num_drafts_seen))
        token_ids, num_accepted, failed = accept_matching(drafts, sampled, ok)
        start = 0
        for i, (request, draft_ids) in enumerate(zip(sampling.requests, drafts, strict=True)):
            rows = slice(start, start + len(draft_ids) + 1)
            if draft_ids and not request.params.greedy:
                output = _verify_sampled(
                    request, processed[rows], draft_ids, draft.probs[i], sampled[rows.stop - 1], ok[rows], sampling
                )
                failed[i] = output is None
                token_ids[i] = output or []
                num_accepted[i] = len(token_ids[i]) - 1 if output else 0
            start = rows.stop
        return VerifyOutput(token_ids, num_accepted, failed, output_logprobs(logits, drafts, token_ids, sampling))


def _verify_sampled(
    request: SamplingRequest,
    processed: Tensor,  # [k + 1, V] fp32
    draft_ids: list[int],
    draft_probs: Tensor | None,  # [k, V] fp32
    bonus: int,
    ok: list[bool],
    sampling: SamplingBatch,
) -> list[int] | None:
    """Output token ids of one request; None where a row that counts is not ok."""
    t = len(request.output_token_ids)
    target_probs = sampling.probs(processed[:-1])
    column = torch.tensor(draft_ids, device=processed.device).unsqueeze(-1)
    if draft_probs is None:
        draft_probs = torch.zeros_like(target_probs).scatter_(1, column, 1.0)
    target_chances = target_probs.gather(1, column).squeeze(-1).tolist()
    draft_chances = draft_probs.gather(1, column).squeeze(-1).tolist()
    for j, (target_chance, draft_chance) in enumerate(zip(target_chances, draft_chances, strict=True)):
        if not ok[j]:
            return None
        if not uniform(request.seed, t + j, ACCEPT) * draft_chance < target_chance:
            return [*draft_ids[:j], recover(target_probs[j], draft_probs[j], request.seed, t + j)]
    return [*draft_ids, bonus] if ok[-1] else None


def recover(target_probs: Tensor, draft_probs: Tensor, seed: int, output_idx: int) -> int:
    """A token drawn from max(0, target - draft): [V] fp32 each."""
    residual = (target_probs - draft_probs).clamp_(min=0.0)
    # Rounding can leave nothing where the two all but agree: then either is right.
    weights = torch.where(residual.amax() > 0, residual, target_probs)
    noise = gumbel_noise([seed], [output_idx], weights.shape[0], weights.device, RECOVER)[0]
    return int((weights.double().log() + noise).argmax())
