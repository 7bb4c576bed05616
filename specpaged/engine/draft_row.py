"""What a step asks of its drafter for one sequence."""

from __future__ import annotations

from specpaged.drafting.base import DraftRow
from specpaged.engine.candidate import glanced_blocks
from specpaged.engine.scheduler import ScheduledSequence
from specpaged.engine.sequence import Sequence
from specpaged.modeling.forward_output import HiddenStates
from specpaged.paging.page_table import DRAFT, TARGET
from specpaged.speculation.controller import GLANCE
from specpaged.speculation.lookup_choice import LookupChoice


def lacks_hidden_states(entry: ScheduledSequence, behind_rounds: bool) -> bool:
    """Whether the sequence's drafter has not read some of the target's, which do not come again."""
    context_lens = entry.sequence.page_table.context_lens
    return len(context_lens) > DRAFT and not behind_rounds and context_lens[DRAFT] < entry.context_len


def draft_row(
    entry: ScheduledSequence,
    k: int,
    request_idx: int,
    hidden: HiddenStates | None,
    *,
    most_tokens: int,
    follows_prompt: bool,
    follows_target: bool = False,
    num_looked_back: int = 0,
    reads_target: bool = False,
    behind_rounds: bool = False,
    lookup: LookupChoice | None = None,
) -> DraftRow | None:
    """What the drafter has to do for a sequence that has just been committed; None if nothing.

    Who has more than `most_tokens` known tokens to catch up with does so in several steps, and drafts in the last one.
    With `follows_prompt` a prefill's tokens are run right behind the target; `follows_target` is SpeculativeStep's: of
    whom it follows, the target's pass has left hidden states.
    Hidden states reach the drafter in any case that goes on, as they do not come again: who lacks some of them, as a
    proposal has failed, drafts no more. Who looks back runs all that the target has run. A `lookup` needs no KV.
    """
    sequence, table = entry.sequence, entry.sequence.page_table
    nothing = None if lookup is None else DraftRow(sequence, (), 0, (), 0, request_idx, lookup=lookup)
    if reads_target and hidden is None:
        return nothing
    drafts = sequence.max_model_draft_tokens > 0  # if it goes on
    catches_up = drafts and not sequence.has_ended and ((entry.in_prefill and follows_prompt) or hidden is not None)
    catches_up = catches_up or follows_target
    if sequence.error is not None or not (k > 0 or catches_up or num_looked_back):
        return nothing
    start, token_ids, blocks = 0, (), ()
    hidden_position = entry.context_len
    if len(table.context_lens) > DRAFT:  # the drafter has KV
        start, blocks = table.context_lens[DRAFT], table.draft_entries
        if behind_rounds:  # which have left those hidden states that the drafter has not read
            hidden_position = start
        if hidden is None:
            end = sequence.num_tokens if k > 0 else table.context_lens[TARGET]
            if k == 0 and table.reserve_draft(end) is None:  # drafts' slots are reserved, and those before them
                return nothing
        else:
            end = table.context_lens[TARGET] + 1 if start >= hidden_position else start
        token_ids, start = table.draft_text(sequence.token_ids, end), table.draft_position
        num_looked_back = min(num_looked_back, len(token_ids))
        if hidden is not None and not token_ids:
            k = 0
        if len(token_ids) > most_tokens and hidden is None:
            k, num_looked_back, token_ids = 0, 0, token_ids[:most_tokens]
    if hidden is not None:
        hidden = hidden.first(table.context_lens[TARGET] - hidden_position)
    elif k == 0 and not token_ids:
        return nothing
    return DraftRow(
        sequence, token_ids, start, blocks, k, request_idx, hidden, hidden_position, num_looked_back, lookup
    )


def glance_row(sequence: Sequence, request_idx: int, most_tokens: int) -> DraftRow | None:
    """The row of a sequence whose last tokens the drafter reads as if they were all; None if there is no room for it.

    Nothing of that is kept. It says what it would have drafted behind the later half of them: behind the others it has
    read too little.
    """
    blocks, end = glanced_blocks(sequence), sequence.page_table.context_lens[TARGET]
    if not blocks or most_tokens < GLANCE:
        return None
    token_ids, num_looked_back = (
        sequence.token_ids[end - GLANCE : end],
        min(GLANCE // 2, len(sequence.output_token_ids)),
    )
    return DraftRow(sequence, token_ids, 0, blocks, 0, request_idx, num_looked_back=num_looked_back, is_glance=True)
