"""What becomes of a round that the device has run: the host's side of it, when it gets to read it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from specpaged.engine.scheduler import ScheduledSequence
from specpaged.engine.sequence import SequenceStatus
from specpaged.paging.block_allocator import IntegrityError
from specpaged.paging.page_table import DRAFT
from specpaged_kernels.decoding_round import NUM_COUNTS

if TYPE_CHECKING:
    from specpaged.engine.device_batch import DeviceBatch, Member
    from specpaged.engine.step import SpeculativeStep
    from specpaged.modeling.copies import Reading

logger = logging.getLogger("specpaged")


@dataclass(frozen=True, slots=True)
class Flight:
    """A round that has been launched and not read."""

    members: SequenceOf[Member]  # who was in the batch then
    rows: SequenceOf[int]  # of them, then: they may have others by now
    drafted: SequenceOf[bool]  # for each of them, whether the draft has run
    reading: Reading  # see `settle_round`


class Outcome(NamedTuple):
    """What a round was to one sequence."""

    token_ids: list[int]
    num_accepted: int
    num_drafts: int  # that were verified
    failed: bool  # no token, or NaN, in the row behind the accepted ones
    num_made: int  # drafts, verified or not
    is_made_up: bool  # its last token is none of the model's: there was none, and its end stands for it

    @classmethod
    def of(cls, row: SequenceOf[int]) -> Outcome:
        """Of its row of `settle_round`'s result."""
        num_outputs, num_accepted, num_drafts, failed, num_made = row[:NUM_COUNTS]
        token_ids = list(row[NUM_COUNTS : NUM_COUNTS + num_outputs])
        return cls(token_ids, num_accepted, num_drafts, failed == 1, num_made, failed == 2)


def commit_flight(step: SpeculativeStep, batch: DeviceBatch, flight: Flight) -> tuple[list[ScheduledSequence], bool]:
    """Append what a round has brought to those who still run, and settle their page tables; waits for that round.

    Nothing of it reaches who has ended since it was launched. Slots that are reserved stay so: the next round, which is
    in flight, may write them. Who failed leaves the batch. Returns the entries that have sampled, as a host's step
    would have them, and whether anybody failed who is to be tried once more, without drafts.
    """
    metrics = step.metrics
    with metrics.stage("verify"):
        rows = flight.reading.values().tolist()
    entries: list[ScheduledSequence] = []
    fared: list[tuple[int, int]] = []
    tries_again, num_drafts, num_made = False, 0, 0
    with metrics.stage("commit"):
        for member, row, drafted in zip(flight.members, flight.rows, flight.drafted, strict=True):
            sequence = member.sequence
            if batch.members.get(sequence) is not member or sequence.status is not SequenceStatus.RUNNING:
                continue
            outcome = Outcome.of(rows[row])
            num_drafts += outcome.num_drafts
            num_made += outcome.num_made
            if outcome.num_drafts:
                fared.append((outcome.num_drafts, outcome.num_accepted))
                if step.planner is not None and not outcome.failed:
                    step.planner.verified(sequence, outcome.num_drafts, outcome.num_accepted)
            entries.append(_commit(step, batch, member, drafted, outcome))
            tries_again |= outcome.failed and sequence.error is None
        metrics.steps += len(entries) > 0  # else all have ended, and it was for nothing
        metrics.rounds += len(entries) > 0
        metrics.unverified_kv_tokens = num_drafts
        metrics.peak_unverified_kv_tokens = max(metrics.peak_unverified_kv_tokens, num_drafts)
        metrics.proposed_tokens += num_made
        if fared:
            metrics.record_drafts(*zip(*fared, strict=True))
    return entries, tries_again


def _commit(
    step: SpeculativeStep, batch: DeviceBatch, member: Member, drafted: bool, outcome: Outcome
) -> ScheduledSequence:
    """One sequence's share: its tokens, its KV, and what is counted of it."""
    sequence, metrics, known = member.sequence, step.metrics, member.state.num_tokens
    sequence.metrics.rounds += 1
    if outcome.num_drafts:
        sequence.metrics.record_draft(outcome.num_drafts, outcome.num_accepted)
    num_emitted = 0
    try:
        num_emitted = sequence.emit(outcome.token_ids, None)
    except IntegrityError:
        raise
    except Exception as error:  # a tokenizer's own, of this request alone
        sequence.fail(error)
    metrics.emitted_tokens += num_emitted
    if outcome.failed:
        _fail(step, member, outcome)
    start = time.perf_counter()
    num_kept = min(outcome.num_accepted, num_emitted)
    metrics.rollbacks += num_kept < outcome.num_drafts
    metrics.rolled_back_tokens += outcome.num_drafts - num_kept
    num_tokens = known + len(outcome.token_ids)  # on the device
    table, last = sequence.page_table, len(sequence.token_ids) - 1
    context_lens, seen = [last] * len(table.context_lens), 0
    if len(context_lens) > DRAFT:
        seen = table.context_lens[DRAFT]
        if drafted:
            seen = min(known + min(outcome.num_accepted, max(outcome.num_drafts - 1, 0)), num_tokens - 1)
        context_lens[DRAFT] = min(seen, last)
    goes_on = not (sequence.has_ended or outcome.failed)
    metrics.rollback_blocks_freed += table.settle(context_lens, table.capacity if goes_on else 0)
    metrics.rollback_seconds += time.perf_counter() - start
    if goes_on:
        batch.advance(member, num_tokens, seen if member.state.has_draft else 0)
    else:
        batch.remove(sequence)
    return ScheduledSequence(sequence, known - 1, 1, not outcome.failed)


def _fail(step: SpeculativeStep, member: Member, outcome: Outcome) -> None:
    """Without drafts that is the request's error; with them it may be NaN beside them, as `SpeculativeStep.verify` has
    it: the sequence drafts no more, and its next step says."""
    sequence = member.sequence
    if not outcome.num_drafts:
        if sequence.finish_reason is None and sequence.error is None:
            sequence.error = (
                f"request {sequence.request_id!r}: the logits of output token {len(sequence.output_token_ids)} hold "
                "NaN or allow no token"
            )
        return
    sequence.max_draft_tokens = 0
    step.metrics.requests_without_drafts += 1
    logger.warning("request %r drafts no more: NaN beside its drafts", sequence.request_id)
