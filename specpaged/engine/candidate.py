"""A sequence as a controller sees it, whose drafts are to be planned."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from specpaged.engine.calls import may_be_in_one_call
from specpaged.engine.sequence import Sequence
from specpaged.paging.page_table import DRAFT
from specpaged.speculation.controller import GLANCE, Candidate, Plan
from specpaged.speculation.decisions import ALIKE


class Arrival(NamedTuple):
    """How a sequence has come that is alone, and of whose drafts nothing is known."""

    lag: int  # tokens that its drafter has not run
    num_left: int | None  # tokens that may still come; None where nothing but a stop says
    kind: Hashable = None  # all else that plans go by

    def would_be_planned(self, plan: Plan) -> bool:
        """Whether it would draft, or not, as one of its kind does by the plan."""
        if plan.lag_repaid is None:
            return True
        return plan.lag_repaid.repays(self.lag, self.num_left) == any(plan.num_draft_tokens)


def candidate_of(sequence: Sequence, follows_target: bool) -> Candidate:
    """Of a drafter that runs whatever the target runs, if it `follows_target`: nobody has to catch up, or can."""
    lag, unseen = (1, 0) if follows_target else (draft_lag(sequence), num_unseen(sequence))
    most, left = sequence.max_draft_tokens, num_left(sequence)
    may_glance = lag > GLANCE and bool(glanced_blocks(sequence))
    return Candidate(sequence, most, lag, unseen, sequence.num_tokens, left, may_glance, sequence.model_drafts)


def arrival_of(sequences: SequenceOf[Sequence], follows_target: bool) -> Arrival | None:
    """Of one that has just come, alone."""
    if len(sequences) != 1 or len(sequences[0].output_token_ids) > 1:
        return None
    (sequence,) = sequences
    lag, left = (1, None) if follows_target else (draft_lag(sequence), num_left(sequence))
    kind = sequence.max_draft_tokens, sequence.num_tokens // ALIKE, may_be_in_one_call(sequence)
    return Arrival(lag, left, kind)


def glanced_blocks(sequence: Sequence) -> SequenceOf[int]:
    """Where the drafter may put the KV of the last GLANCE tokens that the target has run, as if they were all."""
    return sequence.page_table.draft_scratch(GLANCE, sequence.num_prompt_tokens)


def draft_lag(sequence: Sequence) -> int:
    """Known tokens that the drafter has not run; 1 of one that keeps no KV."""
    table = sequence.page_table
    return table.draft_lag(sequence.num_tokens) if len(table.context_lens) > DRAFT else 1


def num_unseen(sequence: Sequence) -> int:
    """Tokens of output that the drafter could say by looking back whether it would have drafted them."""
    return min(draft_lag(sequence) - 1, len(sequence.output_token_ids))


def num_left(sequence: Sequence) -> int | None:
    """Tokens that may still come; None where nothing but a stop says."""
    most = sequence.params.max_tokens
    return None if most is None else most - len(sequence.output_token_ids)
