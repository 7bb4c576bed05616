"""What a step drafts behind its commit: what is asked of the drafter, its answer, and what becomes of that."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from specpaged.drafting.base import DraftRow
from specpaged.drafting.checked import DraftError
from specpaged.drafting.combined import CombinedDrafter
from specpaged.drafting.draft import NO_DRAFT, Draft
from specpaged.drafting.draft_model import DraftModelDrafter
from specpaged.engine.candidate import num_unseen
from specpaged.engine.draft_row import draft_row, glance_row, lacks_hidden_states
from specpaged.engine.followers import give_up
from specpaged.engine.sequence import Sequence
from specpaged.paging.block_allocator import IntegrityError
from specpaged.paging.page_table import DRAFT
from specpaged.sampling import get_sampling_batch
from specpaged.speculation.controller import Plan
from specpaged.speculation.stop_rule import StopRule

if TYPE_CHECKING:
    from specpaged.engine.step import ScoredStep, SpeculativeStep
    from specpaged.sampling.batch import Noise, SamplingBatch
    from specpaged.sampling.request import SamplingRequest

logger = logging.getLogger("specpaged")

_FAR_BEHIND = 16  # tokens: of who drafts now and then, fewer wait for the drafter

# How many tokens to draft for each sequence, which goes on, with slots for them in its page table: at most as many as
# are wanted, where somebody says.
Reserve = Callable[[SequenceOf[Sequence], SequenceOf[int] | None], list[int]]


@dataclass(slots=True)
class Proposal:
    """What a drafter is asked for: `make` has it answer, `keep` leaves the drafts with their sequences.

    Page tables and sequences change in `keep` alone, and in `prepare` before. `make` runs the drafter over rows that
    are values, and touches what is the drafter's own: its KV, and what it keeps by sequence.
    """

    step: SpeculativeStep
    rows: SequenceOf[DraftRow]
    sampling: SamplingBatch  # of those who draft, then of those who look back
    plan: Plan
    drafting: SequenceOf[Sequence]
    looking: SequenceOf[Sequence]
    drafts: list[Draft] = field(default_factory=list)  # of `sampling`'s requests, once they are made
    error: Exception | None = None  # why they could not be

    def make(self) -> None:
        """Ask the drafter. Raises IntegrityError; any other error is kept: whatever is drafted, nobody ends for it."""
        target, device = self.step.target.model.device, self.sampling.device
        try:
            self.drafts = self.step.drafter.propose(self.rows, self.sampling, self.plan.stop_rule)
            if device != target:
                self.drafts = [draft.on(target) for draft in self.drafts]
        except IntegrityError:
            raise
        except Exception as error:
            self.error = error

    def keep(self) -> Noise:
        """Give the sequences their drafts; the noise that was drawn. A drafter that has failed leaves them without."""
        step, drafting = self.step, self.drafting
        drafts, run = self._answer()
        step.metrics.proposed_tokens += sum(map(len, drafts))
        if step.planner is not None and drafts and self.error is None:
            drafts = step.planner.select(drafting, drafts)
        if step.agree is not None and drafts:
            agreed = step.agree([list(draft.token_ids) for draft in drafts])
            drafts = [replace(draft, token_ids=ids) for draft, ids in zip(drafts, agreed, strict=True)]
        for row, num_drafted in run:
            if num_drafted:
                num_drafted = min(num_drafted, len(drafts[row.request_idx]))
            # Drafts have no hidden states of the target, and the newest token has none yet.
            beyond = -1 if row.hidden_states is not None else max(0, num_drafted - 1)
            row.sequence.page_table.advance(DRAFT, len(row.token_ids) + beyond)
        for sequence, draft in zip(drafting, drafts, strict=True):
            sequence.draft = draft
        return self.sampling.noise if self.sampling.device == step.target.model.device else {}

    def _answer(self) -> tuple[list[Draft], list[tuple[DraftRow, int]]]:
        """The drafts of the requests that do not look back, and the rows that the drafter has run with KV of its own:
        all of their tokens, and so many drafts, but for the last one of these.
        """
        step, rows, num_drafting = self.step, self.rows, len(self.drafting)
        if self.error is not None:
            step.metrics.failed_proposals += 1
            reason = f"{type(self.error).__name__}: {self.error}"
            where = None if isinstance(self.error, DraftError) else self.error
            logger.warning(
                "a proposal of %d sequences failed; they have no drafts: %s", len(rows), reason, exc_info=where
            )
            for row in rows:
                step.forget(row.sequence)
            return [NO_DRAFT] * num_drafting, []
        drafts = self.drafts
        rows = [row for row in rows if not (row.num_draft_tokens and _left_out(row, drafts[row.request_idx]))]
        if step.planner is not None:
            if step.planner.clock.tells:
                step.planner.clock.proposed(rows, drafts)
            for sequence, looked_back in zip(self.looking, drafts[num_drafting:], strict=True):
                step.planner.look_back(sequence, looked_back.token_ids)
        run = [
            (row, len(drafts[row.request_idx]) if row.num_draft_tokens else 0)
            for row in rows
            if row.token_ids and not row.is_glance
        ]
        return drafts[:num_drafting], run


def propose(step: SpeculativeStep, scored: ScoredStep, reserve: Reserve) -> Noise:
    """Give sequences that go on their drafts, as `reserve` and the step's planner say; the noise that was drawn."""
    proposal = prepare(step, scored, reserve)
    if proposal is None:
        return {}
    proposal.make()
    return proposal.keep()


def prepare(step: SpeculativeStep, scored: ScoredStep, reserve: Reserve) -> Proposal | None:
    """What to ask the drafter for, with slots for it; None for nothing."""
    going_on = [e.sequence for e in scored.entries if e.samples and not e.sequence.has_ended]
    lacking: list[Sequence] = []
    if scored.hidden_states:
        reading = [entry for entry in scored.entries if entry.sequence in scored.hidden_states]
        lacking = [entry.sequence for entry in reading if lacks_hidden_states(entry, scored.rounds is not None)]
    if step.agree is None:
        for sequence in lacking:  # for good
            give_up(sequence, keeps_lookups=isinstance(step.drafter, CombinedDrafter))
    plan, counts = _plan(step, going_on, lacking, reserve, scored.num_rounds)
    looking = [going_on[i] for i in plan.looks_back if not counts[i]]
    glancing = {going_on[i] for i in plan.glances}
    drafts_nothing = not (any(counts) or any(plan.lookups) or looking)
    if step.planner is not None and drafts_nothing and not scored.hidden_states:
        return None  # plain decoding
    if plan.tries_rows:
        for sequence, count in zip(going_on, counts, strict=True):
            sequence.draft = Draft(sequence.token_ids[-1:] * count, is_trial=True) if count else NO_DRAFT
        return None
    num_draft_tokens = dict(zip(going_on, counts, strict=True))
    lookups = {sequence: choice for sequence, choice in zip(going_on, plan.lookups, strict=False) if choice is not None}
    drafting = [sequence for sequence in going_on if num_draft_tokens[sequence] or sequence in lookups]
    catching_up = step.max_num_batched_tokens  # rows that are left for those who are far behind
    asking = [*drafting, *looking]
    request_idx = {sequence: i for i, sequence in enumerate(drafting)}
    looking_idx = {sequence: i for i, sequence in enumerate(looking, len(drafting))}
    rows: list[DraftRow] = []
    for entry in scored.entries:
        sequence = entry.sequence
        looks = sequence in looking_idx
        if looks and sequence in lookups:  # its drafts, if any, and what it looks back at are two rows
            rows.append(DraftRow(sequence, (), 0, (), 0, request_idx[sequence], lookup=lookups.pop(sequence)))
        most_tokens = max(catching_up, _FAR_BEHIND)
        if looks and sequence in glancing:
            row = glance_row(sequence, looking_idx[sequence], most_tokens)
        else:
            row = draft_row(
                entry,
                num_draft_tokens.get(sequence, 0),
                looking_idx[sequence] if looks else request_idx.get(sequence, 0),
                scored.hidden_states.get(sequence),
                most_tokens=most_tokens,
                follows_prompt=step.planner is None,
                follows_target=step.follows_target,
                num_looked_back=num_unseen(sequence) if looks else 0,
                reads_target=step.drafter.hidden_states is not None,
                behind_rounds=scored.rounds is not None,
                lookup=lookups.get(sequence),
            )
        if row is not None:
            rows.append(row)
            catching_up -= len(row.token_ids) if len(row.token_ids) > _FAR_BEHIND else 0
    if not rows:
        return None
    if plan.stop_rule is not None:
        plan = replace(plan, stop_rule=_rule_of(plan.stop_rule, plan, going_on, rows))
    step.noise = scored.sampling.noise  # of which some is for tokens that are to be decided anew
    sampling = _sampling(step, [sequence.sampling_request for sequence in asking])
    return Proposal(step, rows, sampling, plan, drafting, looking)


def _sampling(step: SpeculativeStep, requests: SequenceOf[SamplingRequest]) -> SamplingBatch:
    """The requests as a proposal's batch. A draft model on a device of its own draws their noise there, once more."""
    runner = step.drafter.runner if isinstance(step.drafter, DraftModelDrafter) else None
    if runner is None or runner.model.device == step.target.model.device:
        return step.sampling(requests)
    return get_sampling_batch(runner.model.backend)(requests, step.vocab_size, runner.model.device)


def _plan(
    step: SpeculativeStep,
    going_on: SequenceOf[Sequence],
    lacking: SequenceOf[Sequence],
    reserve: Reserve,
    num_rounds: int,
) -> tuple[Plan, list[int]]:
    """How deep to draft for each sequence that goes on: as the planner of the first rank says, as far as slots go.

    Ranks have to agree on who drafts: those of which the first one is `lacking` hidden states do not, the others do.
    """
    combined = step.drafter if isinstance(step.drafter, CombinedDrafter) else None
    if step.planner is None:
        counts = reserve(going_on, None)
        return (Plan(counts), counts) if combined is None else _undecided(combined, counts)
    plan = step.planner.plan(going_on, num_rounds) if going_on else Plan([])
    if plan.tries_rows and step.drafter.hidden_states is not None:
        plan = Plan([0] * len(going_on))  # heads follow in every step
    if plan.stop_rule is not None and (step.agree is not None or not _takes_argmax(going_on, plan)):
        plan = replace(plan, num_draft_tokens=list(plan.without_rule), stop_rule=None)
    if step.agree is not None and going_on:
        most = [0 if choice is None else choice.num_tokens for choice in plan.lookups]
        looks_back, glances = list(plan.looks_back), list(plan.glances)
        able = [
            0 if sequence in lacking else count for sequence, count in zip(going_on, plan.num_draft_tokens, strict=True)
        ]
        counts, looks_back, glances, most, (tries_rows,) = step.agree(
            [able, looks_back, glances, most, [int(plan.tries_rows)]]
        )
        lookups = [combined.choice(*of) for of in zip(most, counts, strict=True)] if any(most) else ()
        plan = Plan(counts, looks_back, glances=glances, lookups=lookups, tries_rows=bool(tries_rows))
    counts = plan.num_draft_tokens
    if not any(plan.lookups):
        return plan, reserve(going_on, counts) if any(counts) else counts
    most = [0 if choice is None else choice.num_tokens for choice in plan.lookups]
    room = reserve(going_on, list(map(max, counts, most)))
    lookups = [choice and choice.within(of_room) for choice, of_room in zip(plan.lookups, room, strict=True)]
    return replace(plan, lookups=lookups), list(map(min, counts, room))


def _undecided(drafter: CombinedDrafter, most: SequenceOf[int]) -> tuple[Plan, list[int]]:
    """The plan of several drafters where nobody decides: each may have so many, whoever drafts."""
    counts = list(most) if drafter.model is not None else [0] * len(most)
    lookups = [drafter.choice(*of) for of in zip(most, counts, strict=True)]
    return Plan(counts, lookups=lookups), counts


def _takes_argmax(going_on: SequenceOf[Sequence], plan: Plan) -> bool:
    """Whether drafts, and what is looked back at, are each the most likely token, which alone are made by a rule."""
    counts = zip(going_on, plan.num_draft_tokens, strict=True)
    asking = [sequence for sequence, count in counts if count] + [going_on[i] for i in plan.looks_back]
    return all(sequence.sampling_request.takes_argmax for sequence in asking)


def _rule_of(rule: StopRule, plan: Plan, going_on: SequenceOf[Sequence], rows: SequenceOf[DraftRow]) -> StopRule | None:
    """The rule for those of its rows that draft, as some may have no room, or be too far behind yet.

    None if nobody does, or it was made for others.
    """
    planned = [sequence for sequence, count in zip(going_on, plan.num_draft_tokens, strict=True) if count]
    drafting = {row.sequence for row in rows if row.num_draft_tokens}
    kept = [i for i, sequence in enumerate(planned) if sequence in drafting]
    if not kept or len(rule.leads) != len(planned):
        return None
    return rule if len(kept) == len(planned) else rule.of_rows(kept)


def _left_out(row: DraftRow, draft: Draft) -> bool:
    """Whether a lookup has drafted in the place of a model, which then has not run."""
    return draft.drafter > 0 and row.hidden_states is None
