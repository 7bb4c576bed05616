"""What rounds in one call ask for one sequence."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any

from specpaged.engine.scheduler import ScheduledSequence
from specpaged.modeling.rounds import DecodingRow, Lookup
from specpaged.paging.page_table import DRAFT

if TYPE_CHECKING:
    from specpaged.speculation.lookup_choice import LookupChoice


def decoding_row(
    entry: ScheduledSequence,
    num_draft_tokens: int,
    most_tokens: int,
    lookup: Lookup | None = None,
    choice: LookupChoice | None = None,
    lookups: SequenceOf[Lookup] = (),
) -> DecodingRow:
    """Of a sequence that may come to so many tokens, with so many drafts for each further round: the drafter's, or of
    `lookup`, or, by a `choice`, of one of `lookups`.
    """
    sequence, start, draft = entry.sequence, entry.context_len, entry.draft.token_ids
    table = sequence.page_table
    draft_context_len, draft_blocks = start, None
    if len(table.context_lens) > DRAFT:
        draft_blocks = table.draft_entries
        draft_context_len = min(table.context_lens[DRAFT], sequence.num_tokens + len(draft))  # of a draft that was cut
        if num_draft_tokens:
            start = min(start, draft_context_len)
        else:
            draft_context_len = max(start, draft_context_len)
    return DecodingRow(
        sequence.token_ids[start:] if start else sequence.token_ids,
        start,
        draft_context_len,
        draft,
        num_draft_tokens,
        max(most_tokens, len(draft) + 1),
        sequence.stop_ids if sequence.stop_checker is None else sequence.stop_checker.stop_ids,
        table.entries,
        lookup.address(sequence, sequence.token_ids) if lookup is not None and num_draft_tokens else 0,
        choice,
        [] if choice is None else [each.address(sequence, sequence.token_ids) for each in lookups],
        draft_blocks,
        table.num_skipped,
    )


def row_of_reader(entry: ScheduledSequence, num_draft_tokens: int, most_tokens: int, **lookups: Any) -> DecodingRow:
    """Of a sequence whose drafter reads what the target has run: one that lacks some of it, or is followed no more,
    says so, and drafts no more.

    It says that it lacks the last but one of its tokens, whichever it is.
    """
    sequence, table = entry.sequence, entry.sequence.page_table
    lags = sequence.max_model_draft_tokens == 0 or table.context_lens[DRAFT] < entry.context_len
    row = decoding_row(entry, 0 if lags else num_draft_tokens, most_tokens, **lookups)
    if not lags or entry.context_len == 0:
        return row
    start = entry.context_len - 1
    return row._replace(token_ids=sequence.token_ids[start:], start=start, draft_context_len=start)
