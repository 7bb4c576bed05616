"""Between a step and its controller: sequences as candidates, drafts as evidence, what came of them, and seconds."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from operator import eq, gt

from specpaged.drafting.draft import NO_DRAFT, Draft, evidence_of
from specpaged.engine.call_length import CallLength
from specpaged.engine.calls import Calls
from specpaged.engine.candidate import Arrival, arrival_of, candidate_of
from specpaged.engine.chore import Chore
from specpaged.engine.followers import Followers
from specpaged.engine.outcomes import Outcomes
from specpaged.engine.scheduler import ScheduledSequence
from specpaged.engine.sequence import Sequence
from specpaged.engine.standing_plan import StandingPlan
from specpaged.engine.step_clock import OFTEN, StepClock, ask
from specpaged.speculation.controller import Controller, Plan
from specpaged.speculation.cost_model import CostModel
from specpaged.speculation.lookup_choice import LookupChoice
from specpaged.speculation.stop_rule import StopRule

# Seconds that it takes to look at a proposal's outcome, to plan, and to say whom to look back at; what of the time may
# go into each; and the steps from one to the next.
_LOOKING = 8e-5, 0.0026, 4, 12
_PLANNING = 1.6e-4, 0.0024, 1, 48
_LOOKING_AGAIN = 6e-5, 0.0022, 1, 64
# Steps at most, that a plan is followed for because to plan takes long; and as many again, if the one before was not.
_SELDOM = 64
_SOON = 8  # steps that a plan is good for at most, where a text has turned


class DraftPlanner:
    """Asks a controller on behalf of a step, and tells it what drafts and passes came to.

    Plans take time, and so does looking at what came of drafts: between two passes of a model nothing of this is in
    the caches. In the first steps there is always time; then each is a Chore, done as often as a share of it allows,
    the longer the steps, the more often; but for a plan that is provisional, whose few steps are all looked at. What
    came of drafts is told when next a plan is made, all of it at once.
    """

    def __init__(self, controller: Controller, follows_target: bool = False, gives_up: bool = True):
        self.controller = controller
        self.follows_target = follows_target  # the drafter does: nobody has to catch up, or can
        follows = follows_target and gives_up  # ranks have to give up the same ones
        self.followers = Followers(keeps_lookups=bool(getattr(controller, "lookups", ()))) if follows else None
        self.clock = StepClock(controller, follows_target)
        self._looking, self._planning, self._looking_again = Chore(*_LOOKING), Chore(*_PLANNING), Chore(*_LOOKING_AGAIN)
        self._observe_proposed = getattr(controller, "observe_proposed", None)  # of whom asks a drafter without a model
        self._standing = StandingPlan()
        self._half: int | None = None  # whose plan it is, where batches go by halves
        self._others: dict[int, StandingPlan] = {}  # the other half's
        self.outcomes, self.calls = Outcomes(controller), Calls()
        self._proposals: dict[Sequence, Draft] = {}  # of which nobody knows yet what came of them
        self._num_proposed = self._looked_next = 0  # proposals; the step whose drafts will be waited for, at the latest
        # Whether drafts are such as turns are followed of: what others find is asked for whatever the text.
        self._models_draft = getattr(self.costs, "draft", None) is not None
        self._is_late = False  # the host, in rounds of a device's
        self._selects = True  # whether drafts were selected from when that was asked last

    @property
    def costs(self) -> CostModel | None:
        """What passes take, as the controller knows it now; None of one that does not ask."""
        return getattr(self.controller, "costs", None)

    @property
    def _looks_back(self) -> bool:
        """Whether somebody says whom to look back at, and the drafter can."""
        looks_back = hasattr(self.controller, "look") and getattr(self.controller, "looks_back", True)
        return looks_back and self._models_draft and not self.follows_target

    def turn_to(self, half: int | None) -> None:
        """Plans are those of one half of a batch from now on, of which the last one holds as ever; None: of all of it.

        A half's passes run beside others, and so take longer: nothing of that is told to the controller.
        """
        self.clock.is_deaf = half is not None
        if self.costs is not None:
            self.costs.overlaps = half is not None
        if half == self._half:
            return
        if None in (half, self._half):
            self._others.clear()
        else:
            self._others[self._half] = self._standing
        self._half = half
        self._standing = self._others.pop(half, None) or StandingPlan()

    @property
    def drafts(self) -> bool:
        """Whether the last plan has drafts in it, of either half; where a half has none yet, it may have."""
        standing = [self._standing, *self._others.values()]
        if self._half is not None and not all(of_half.sequences for of_half in standing):
            return True
        return any(of_half.drafts for of_half in standing)

    def plan(self, sequences: SequenceOf[Sequence], num_rounds: int = 1) -> Plan:
        """How much to draft for each of the sequences, which go on from so many rounds, and at whose to look back."""
        self._standing.age += num_rounds
        self.calls.went_by(num_rounds - 1, self._standing.plan)
        if self._standing.holds_for(sequences):
            if self._standing.looks_in > 0:
                return self._standing.again
            return self.clock.leave_out(self._looking_again, self._look_again)
        arrival = arrival_of(sequences, self.follows_target) if self.clock.num_steps > OFTEN else None
        if arrival is not None and self._standing.is_left_to(sequences[0], arrival):
            if self.followers is not None:
                self.followers.planned(sequences, self._standing.plan.num_draft_tokens, 0)
            return self._standing.again
        return self.clock.leave_out(self._planning, self._plan_anew, sequences, num_rounds, arrival)

    def _look_again(self) -> Plan:
        """What stands, and whom to look back at."""
        standing = self._standing
        num_steps, standing.looked = standing.age - standing.looked, standing.age
        candidates = [candidate_of(sequence, self.follows_target) for sequence in standing.sequences]
        looks_back, glances = ask(self.controller.look, candidates, num_steps, otherwise=((), ()))
        standing.looks_every = self._looks_in()
        return replace(standing.again, looks_back=looks_back, glances=glances)

    def leave_to_device(self, waits: bool) -> None:
        """Rounds are a device's from now on, wherever they can be, and the host waits for each of them, or is late."""
        self._is_late = not waits
        leave = getattr(self.controller, "leave_to_device", None)
        if leave is not None:
            ask(leave)

    def plan_round(self, sequences: SequenceOf[Sequence]) -> list[int]:
        """How much to draft for each in a round that a device runs by itself: nobody hears what it takes, or looks at a
        draft before it is verified.
        """
        with self.clock.of_device(self._is_late):
            plan = self.plan(sequences)
            self.begin()
        if plan.tries_rows:  # as a host's step has planned it
            return [0] * len(sequences)
        return list(plan.num_draft_tokens if plan.stop_rule is None else plan.without_rule)

    def dropped(self) -> None:
        """What the host has drafted is verified by nobody: rounds draft for themselves."""
        self._proposals.clear()

    def verified(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """So many of its drafts stood in such a round, of those that the target has seen."""
        ask(self.controller.observe_drafts, sequence, num_accepted, int(num_accepted < num_drafts))

    def _plan_anew(self, sequences: SequenceOf[Sequence], num_rounds: int, arrival: Arrival | None) -> Plan:
        self.outcomes.tell()
        candidates = [candidate_of(sequence, self.follows_target) for sequence in sequences]
        asks = self._selects and not getattr(self.controller, "selects_by_rule", False)
        plain_rounds, drafting_rounds = self.calls.expect(sequences, asks, self.costs)
        age = self._standing.age
        plan = ask(self.controller.plan, candidates, age, otherwise=Plan([0] * len(sequences)))
        if plan.tries_rows and (self.follows_target or self.clock.is_deaf):
            # Heads have to run what the target runs, and would not; and beside another lane nobody listens.
            plan = Plan([0] * len(sequences))
        if self.followers is not None:
            self.followers.planned(sequences, plan.num_draft_tokens, age - self._standing.since)
        if (num_unsettled := self._standing.still_unsettled(sequences, plan)) and not plan.is_trial:
            plan = replace(plan, is_provisional=True, num_steps=min(_SOON, plan.num_steps))
        good_for = plan.num_steps
        if not (plan.is_trial or plan.is_provisional) and self.clock.num_steps > OFTEN:
            rounds = drafting_rounds if any(plan.num_draft_tokens) else plain_rounds
            seldom = min(_SELDOM, rounds * self.clock.every(self._planning))
            too_early = max(0, self._standing.num_left)  # steps: somebody has come
            good_for = max(good_for, seldom + min(seldom, too_early))
        of_model = not (plan.is_trial or plan.lookups)
        left_by = arrival if of_model and not plan.is_provisional else None
        self._standing = StandingPlan(list(sequences), plan, 0, good_for, left_by, self._standing.decided)
        self._standing.num_unsettled = max(0, num_unsettled - (not plan.is_trial))
        if of_model and not self._standing.drafts and self._looks_back:
            self._standing.looks_every = self._looks_in()
        return plan

    def _looks_in(self) -> int:
        """Steps, behind which to ask whom to look back at: when there may be somebody, and there is time to ask."""
        looks_in = getattr(self.controller, "looks_in", Controller.looks_in)
        return max(looks_in, self.costs.plain_rounds * self.clock.every(self._looking_again))

    def rounds(self, sequences: SequenceOf[Sequence]) -> tuple[int, list[int], StopRule | None, bool]:
        """How many rounds of these sequences may be one call; of further ones, the drafts of each, and their rule.

        Where drafts are selected from, and no rule does so in the controller's place, it has to be asked in each round.
        The last one says whether the drafts behind these rounds may be made in the same call: whether nobody is to be
        asked for a plan by then, nor what became of drafts. If they are, `went_on` is to be called.
        """
        standing, plan = self._standing, self._standing.plan
        counts = plan.num_draft_tokens
        asks = plan.tries_rows or (self._selects and plan.stop_rule is None and any(counts))
        if asks or sequences != standing.sequences:
            return 1, [], None, False
        drafts = standing.drafts
        # Of a trial of none, the last one is a call of its own: behind that, others draft, and its rest is not plain.
        num_left = standing.num_left - (plan.is_trial and not drafts and standing.num_left > 1)
        num_rounds = max(1, min(self.calls.most_rounds(len(sequences), drafts), num_left))
        next_asked = min(standing.num_left, standing.looks_in)
        goes_on = num_rounds < next_asked and self.clock.num_steps > OFTEN and not (drafts and self.looks_at_rounds)
        return num_rounds, list(counts), plan.stop_rule, goes_on

    @property
    def lookups(self) -> SequenceOf[LookupChoice | None]:
        """Of further rounds, as `rounds` says, when each sequence takes a lookup's draft; nothing: never."""
        return self._standing.plan.lookups

    def went_on(self, num_rounds: int) -> None:
        """So many rounds have been run, and the drafts behind them made, as `rounds` has said."""
        self._standing.age += num_rounds
        self.calls.went_by(num_rounds, self._standing.plan)

    def expect_calls(self, call_length: CallLength, drafts_in_rounds: bool) -> None:
        """So many rounds may be one call, and those that draft, too, where drafts may be made in it."""
        self.calls.length, self.calls.may_draft = call_length, drafts_in_rounds

    def select(self, sequences: SequenceOf[Sequence], drafts: SequenceOf[Draft]) -> list[Draft]:
        """As much of each sequence's draft as is to be verified. The whole of it waits for its outcome."""
        self.calls.proposed()
        self._num_proposed += 1
        found = any(draft or draft.found for draft in drafts)
        if self._observe_proposed is not None:
            ask(self._observe_proposed, len(drafts), found)
        if not found or not (self._selects or self.looks_at_rounds):
            return list(drafts)
        return self.clock.leave_out(self._looking, self._select, sequences, drafts)

    def _select(self, sequences: SequenceOf[Sequence], drafts: SequenceOf[Draft]) -> list[Draft]:
        self._looked_next = self.clock.num_steps + self.clock.every(self._looking)
        proposals = self._proposals = dict(zip(sequences, drafts, strict=True))
        self._selects = ask(self.controller.selects, otherwise=False)
        if not self._selects:
            return list(drafts)
        planned = self._standing.sequences
        evidence = [
            [] if draft.drafter else evidence_of(draft)
            for draft in (proposals.get(sequence, NO_DRAFT) for sequence in planned)
        ]
        selected = ask(self.controller.select, planned, evidence, otherwise=[*map(len, evidence)])
        counts = dict(zip(planned, selected, strict=True))
        return [
            draft if draft.drafter else draft.cut(counts[sequence])
            for sequence, draft in zip(sequences, drafts, strict=True)
        ]

    def look_back(self, sequence: Sequence, proposed: SequenceOf[int]) -> None:
        """What would have been drafted in place of the sequence's last tokens of output, up to the newest one."""
        came = sequence.token_ids[sequence.num_tokens - len(proposed) :]
        num_stood = sum(map(eq, proposed, came))
        if self.outcomes.looked_back(sequence, num_stood, len(proposed) - num_stood):
            self._standing_of(sequence).ends_with_turn()

    def fared(self, sequence: Sequence, num_drafts: SequenceOf[int], num_accepted: SequenceOf[int]) -> None:
        """So many drafts were verified in each of some rounds, and so many stood; where a text turns, plans are over.

        Of lookups' drafts, beside a model's or without one, nothing is planned by that.
        """
        standing = self._standing_of(sequence)
        if self._models_draft and not standing.plan.lookups:
            num_rejected = sum(map(gt, num_drafts, num_accepted))
            if self.outcomes.verified(sequence, sum(num_accepted), num_rejected):
                standing.ends_with_turn()

    def _standing_of(self, sequence: Sequence) -> StandingPlan:
        """The plan that is for the sequence: where batches go by halves, it may be the other one's."""
        if not self._others:
            return self._standing
        others = (other for other in self._others.values() if sequence in other.sequences)
        return next(others, self._standing)

    def committed(self, sequence: Sequence, token_ids: SequenceOf[int]) -> None:
        """These tokens stand behind what was proposed: the outcome of as many drafts, verified or not."""
        if (draft := self._proposals.pop(sequence, NO_DRAFT)) is not NO_DRAFT:
            self.told(sequence, draft, token_ids)

    @property
    def looks_at_rounds(self) -> bool:
        """Whether what became of drafts made within rounds is to be `told`."""
        is_early, is_due = self._num_proposed <= OFTEN, self.clock.num_steps >= self._looked_next
        return is_early or is_due or self._standing.plan.is_provisional

    def told(self, sequence: Sequence, draft: Draft, token_ids: SequenceOf[int]) -> None:
        """These tokens stand where this was drafted."""
        self.outcomes.add(sequence, draft, token_ids)

    def begin(self, entries: SequenceOf[ScheduledSequence] | None = None) -> None:
        """The target's pass begins over these entries, and the step before has ended."""
        plan = self._standing.plan
        self.clock.begin(plan.is_trial, self._standing.age, plan.tries_rows, entries)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended, or given up its KV: what was planned for it no longer holds."""
        self._standing.forget(sequence)
        if self._others:
            self._others = {half: other for half, other in self._others.items() if sequence not in other.sequences}
        if self.followers is not None:
            self.followers.forget(sequence)
        if not (self._standing.sequences or self._others):
            self.clock.idle()
        self._proposals.pop(sequence, None)
        self.outcomes.forget(sequence)
