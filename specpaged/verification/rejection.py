"""Classic speculative sampling (Leviathan et al. 2023, arXiv:2211.17192).

It keeps the target's distribution, not its samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from specpaged.sampling.batch import SamplingBatch
from specpaged.sampling.elementwise import log_fp32_
from specpaged.sampling.noise import ACCEPT, RECOVER, gumbel_noise, uniform
from specpaged.verification.base import Matched, Verifier, VerifyRows
from specpaged.verification.greedy import accept_matching

if TYPE_CHECKING:
    from specpaged.drafting.base import DraftOutput


class RejectionVerifier(Verifier):
    """A draft d stands with probability min(1, target(d) / draft(d)), both after processing.

    The token after a rejection is *recovered*: drawn from max(0, target - draft), renormalised. The one after
    all drafts is the target's sample. Each draw is a function of (seed, output index, purpose), so a run can be
    repeated; unlike coupled verification, the output depends on the drafts. Greedy requests are matched exactly.
    """

    name = "rejection"

    @override
    def match(self, rows: VerifyRows, draft: DraftOutput, sampling: SamplingBatch) -> Matched:
        drafts, processed = draft.token_ids, rows.processed(draft, sampling)
        sampled, ok = (x.tolist() for x in sampling.sample(processed, rows.request_idx, rows.num_drafts_seen))
        token_ids, num_accepted, failed = accept_matching(drafts, sampled, ok)
        # The rows that judge a draft token by chance, packed: `first_row` of M and `first` of these, per request.
        chosen, judged, first_row = [], [], 0
        for i, draft_ids in enumerate(drafts):
            if draft_ids and not sampling.requests[i].params.greedy:
                chosen.append((i, first_row, len(judged)))
                judged += range(first_row, first_row + len(draft_ids))
            first_row += len(draft_ids) + 1
        if chosen:
            indices = [i for i, _, _ in chosen]
            target_probs = sampling.probs(processed[torch.tensor(judged, device=processed.device)])
            draft_probs = _draft_probs(draft, indices, target_probs)
            column = torch.tensor([v for i in indices for v in drafts[i]], device=processed.device).unsqueeze(-1)
            target_chances = target_probs.gather(1, column).squeeze(-1).tolist()
            draft_chances = draft_probs.gather(1, column).squeeze(-1).tolist()
            rejected: list[tuple[int, int]] = []  # (request, packed row)
            for i, row, first in chosen:
                rows_of_draft = slice(first, first + len(drafts[i]))
                accepted = _num_accepted(
                    sampling, i, target_chances[rows_of_draft], draft_chances[rows_of_draft], ok[row:]
                )
                failed[i] = not ok[row + accepted]
                num_accepted[i] = accepted
                token_ids[i] = drafts[i][:accepted] if failed[i] else [*drafts[i][:accepted], sampled[row + accepted]]
                if accepted < len(drafts[i]) and not failed[i]:
                    rejected.append((i, first + accepted))
            if rejected:
                fallen = torch.tensor([row for _, row in rejected], device=processed.device)
                seeds = [sampling.requests[i].seed for i, _ in rejected]
                output_idx = [sampling.output_idx(i, num_accepted[i]) for i, _ in rejected]
                recovered = recover(target_probs[fallen], draft_probs[fallen], seeds, output_idx).tolist()
                for (i, _), token_id in zip(rejected, recovered, strict=True):
                    token_ids[i][-1] = token_id
        return token_ids, num_accepted, failed


def _draft_probs(draft: DraftOutput, indices: Sequence[int], like: Tensor) -> Tensor:
    """Draft probabilities of the packed rows; all on its token where a draft brings none."""
    rows_of_drafts = []
    for i in indices:
        probs = draft.probs[i]
        if probs is None:
            column = torch.tensor(draft.token_ids[i], device=like.device).unsqueeze(-1)
            probs = torch.zeros(len(column), like.shape[1], device=like.device).scatter_(1, column, 1.0)
        rows_of_drafts.append(probs)
    return torch.cat(rows_of_drafts)


def _num_accepted(
    sampling: SamplingBatch, i: int, target_chances: list[float], draft_chances: list[float], ok: list[bool]
) -> int:
    """Drafts of request i before the first that is rejected, or whose row is not ok."""
    seed = sampling.requests[i].seed
    for j, (target_chance, draft_chance) in enumerate(zip(target_chances, draft_chances, strict=True)):
        if not ok[j] or not uniform(seed, sampling.output_idx(i, j), ACCEPT) * draft_chance < target_chance:
            return j
    return len(target_chances)


def recover(target_probs: Tensor, draft_probs: Tensor, seeds: Sequence[int], output_idx: Sequence[int]) -> Tensor:
    """[R, V] fp32 twice -> [R] int64: a token per row, drawn from max(0, target - draft), renormalised."""
    residual = (target_probs - draft_probs).clamp_(min=0.0)
    # Rounding can leave nothing where the two all but agree: then either is right.
    weights = torch.where(residual.amax(dim=-1, keepdim=True) > 0, residual, target_probs)
    noise = gumbel_noise(seeds, output_idx, weights.shape[1], weights.device, RECOVER)
    log_weights = log_fp32_(weights.clamp(min=1e-37)).masked_fill_(weights == 0, float("-inf"))
    return log_weights.add_(noise).argmax(dim=-1)
