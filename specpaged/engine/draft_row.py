"""What a step asks of its drafter for one sequence."""

from __future__ import annotations

from specpaged.drafting.base import DraftRow
from specpaged.engine.scheduler import ScheduledSequence
from specpaged.modeling.forward_output import HiddenStates
from specpaged.paging.page_table import DRAFT, TARGET


def draft_row(
    entry: ScheduledSequence,
    k: int,
    request_idx: int,
    hidden: HiddenStates | None,
    publishes: bool,
    follows_target: bool,
    looks_back: bool = False,
) -> DraftRow | None:
    """What the drafter has to do for a sequence that has just been committed; None if nothing.

    Behind a prefill it runs what the target has run, drafts or not: that KV may be shared. Hidden states reach it
    in any case that goes on, as they do not come again. Who looks back runs all that the target has run. `publishes`
    and `follows_target` are SpeculativeStep's.
    """
    sequence, table = entry.sequence, entry.sequence.page_table
    in_prefill = entry.num_new_tokens > 1 or not entry.samples
    goes_on = publishes or not sequence.has_ended
    catches_up = sequence.max_draft_tokens > 0 and goes_on and (in_prefill or hidden is not None)
    catches_up = catches_up or follows_target
    if sequence.error is not None or not (k > 0 or catches_up or looks_back):
        return None
    start, token_ids, blocks = 0, (), ()
    if len(table.context_lens) > DRAFT:  # the drafter has KV
        start, blocks = table.context_lens[DRAFT], table.entries
        token_ids = sequence.token_ids[start : sequence.num_tokens if k > 0 else table.context_lens[TARGET]]
    if hidden is not None:
        hidden = hidden.first(table.context_lens[TARGET] - entry.context_len)
    elif k == 0 and not token_ids:
        return None
    return DraftRow(sequence, token_ids, start, blocks, k, request_idx, hidden, entry.context_len, looks_back)
