"""A sequence as a controller sees it, whose drafts are to be planned."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf

from specpaged.engine.calls import may_be_in_one_call
from specpaged.engine.sequence import Sequence
from specpaged.engine.standing_plan import Arrival
from specpaged.paging.page_table import DRAFT
from specpaged.speculation.controller import GLANCE, Candidate
from specpaged.speculation.decisions import ALIKE


def candidate_of(sequence: Sequence, follows_target: bool) -> Candidate:
    """Of a drafter that runs whatever the target runs, if it `follows_target`: nobody has to catch up, or can."""
    lag, unseen = (1, 0) if follows_target else (draft_lag(sequence), num_unseen(sequence))
    most, left = sequence.max_draft_tokens, num_left(sequence)
    may_glance = lag > GLANCE and bool(glanced_blocks(sequence))
    return Candidate(sequence, most, lag, unseen, sequence.num_tokens, left, may_glance)


def arrival_of(sequences: SequenceOf[Sequence], follows_target: bool) -> Arrival | None:
    """Of one that has just come, alone."""
    if len(sequences) != 1 or len(sequences[0].output_token_ids) > 1:
        return None
    (sequence,) = sequences
    lag, left = (1, None) if follows_target else (draft_lag(sequence), num_left(sequence))
    if lag <= 1 or left is None:  # who has not to catch up has nothing to repay
        left = math.inf
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
