"""How a host launches a round on the device: whoever is behind catches up, what has changed goes up, the round runs."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

from specpaged.drafting.base import DraftRow
from specpaged.drafting.draft import NO_DRAFT
from specpaged.engine.device_batch import draft_context_len
from specpaged.engine.device_commit import Flight
from specpaged.modeling.device_state import RowState
from specpaged.paging.page_table import DRAFT

if TYPE_CHECKING:
    from specpaged.engine.device_batch import DeviceBatch
    from specpaged.engine.sequence import Sequence
    from specpaged.engine.step import SpeculativeStep
    from specpaged.modeling.copies import Copies
    from specpaged.modeling.device_round import DeviceRound

_MOST_BEHIND = 2  # tokens that a round's first pass of the draft runs of a sequence


def take_over(sequence: Sequence) -> None:
    """Drop what the host has drafted for a sequence, if anything: its rounds draft for themselves. Slots that are
    reserved for them stay so."""
    sequence.draft, num_tokens = NO_DRAFT, len(sequence.token_ids)
    if draft_context_len(sequence) >= num_tokens:
        table = sequence.page_table
        context_lens = list(table.context_lens)
        context_lens[DRAFT] = num_tokens - 1
        table.settle(context_lens, table.capacity)


def row_state(sequence: Sequence, limit: int, num_drafts: int, drafts: bool, end_id: int = 0) -> RowState:
    """The row of a sequence with at most so many drafts in a round, and at most `limit` tokens in all.

    Where nobody `drafts`, its KV of the draft falls behind.
    """
    has_draft = drafts and sequence.max_draft_tokens > 0
    return RowState(
        num_tokens=len(sequence.token_ids),
        draft_context_len=draft_context_len(sequence) if has_draft else 0,
        limit=limit,
        max_drafts=num_drafts,
        has_draft=has_draft,
        num_prompt_tokens=sequence.num_prompt_tokens,
        seed=sequence.seed,
        temperature=sequence.params.temperature,
        end_id=end_id,
    )


def launch(
    step: SpeculativeStep,
    batch: DeviceBatch,
    device_round: DeviceRound,
    copies: Copies,
    sequences: SequenceOf[Sequence],
    states: SequenceOf[RowState],
    num_drafts: int,
    late: bool,
) -> Flight:
    """Launch a round of these sequences, of up to num_drafts each where anybody drafts; nothing waits for the device.

    `late`: the round before has not been read, so that it may have brought tokens that the host does not know of.
    """
    _catch_up(step, batch, sequences, states, late)
    members = batch.sync(sequences, states)
    batch.state.flush()
    most_unread = late * (device_round.num_drafts + 1)
    lengths = [min(state.limit, state.num_tokens + state.max_drafts + most_unread) for state in states]
    temperatures = [sequence.params.temperature for sequence in sequences]
    num_drafts = num_drafts if any(state.has_draft for state in states) else 0
    has_temperatures = any(t not in (0, 1) for t in temperatures)
    bucket = device_round.bucket(batch.num_rows, num_drafts, lengths, any(temperatures), has_temperatures)
    result = device_round.launch(bucket)
    rows, drafted = [member.row for member in members], [state.has_draft for state in states]
    return Flight(members, rows, drafted, copies.read(result))


def _catch_up(
    step: SpeculativeStep,
    batch: DeviceBatch,
    sequences: SequenceOf[Sequence],
    states: SequenceOf[RowState],
    late: bool,
) -> None:
    """Run the draft over what it has not seen, but for what a round runs itself."""
    rows = []
    for sequence, state in zip(sequences, states, strict=True):
        if not state.has_draft:
            continue
        start, end = state.draft_context_len, state.num_tokens - 1
        # Of a round in flight in which nobody drafts everybody gets one token; but who was not in it.
        member = batch.members.get(sequence)
        unseen = late and member is not None and not member.state.has_draft
        if end + 1 + unseen - start > _MOST_BEHIND and end > start:
            table = sequence.page_table
            rows.append(DraftRow(sequence, sequence.token_ids[start:end], start, table.entries, 0, 0))
            state.draft_context_len = end
    if not rows:
        return
    step.drafter.propose(rows, step.sampling([]))
    for row in rows:
        row.sequence.page_table.advance(DRAFT, len(row.token_ids))
