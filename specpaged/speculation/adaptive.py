"""Drafting that takes what promises most tokens per second, by measured cost and acceptance."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial

from typing_extensions import override

from specpaged.speculation.acceptance import AcceptanceModel
from specpaged.speculation.controller import Candidate, MeasuringController, Plan
from specpaged.speculation.cost_model import CostModel
from specpaged.speculation.decisions import ALIKE, Decision, Decisions
from specpaged.speculation.looks import Looks
from specpaged.speculation.pass_seconds import PassShape
from specpaged.speculation.plan_length import PlanLength
from specpaged.speculation.prospects import LOOKING, Prospects
from specpaged.speculation.repayment import Repayment
from specpaged.speculation.requests import Requests
from specpaged.speculation.selecting import Selecting
from specpaged.speculation.selection import Selection, select
from specpaged.speculation.step_times import StepTimes, TimesOfSteps
from specpaged.speculation.stop_rule import StopRule
from specpaged.speculation.trials import ROWS_TRIAL_STEPS, TRIAL_STEPS, Trials, hopeful, price_of_rows

_ADVANCE = 0.25  # of its share of a plain step, for a new request, of which nothing is known yet
# Drafts must promise so much more tokens per second than plain decoding to begin, and less to go on, the less the
# fewer have had an outcome: noise is not to switch them on and off, and who has stopped has to catch up first. As long
# as what passes take is in doubt, more.
_TO_BEGIN, _TO_GO_ON = 0.05, 0.02
_DOUBT_TO_BEGIN, _DOUBT_TO_GO_ON = 1 / 3, 1 / 6  # standard deviations
_HEARD = 2  # steps that a trial has to have come to: of drafts, the first of them is not told
_EARLY = 0.4  # divided by the square root of the number of outcomes
_SOON = 4  # steps that a plan is good for, which is to find out what comes of some requests' drafts
_TOLD_APART = 0.6  # in logits: of less spread, evidence says too little to stop a proposal by
_BEYOND = 0.8  # of what a row costs to a rule: what those beyond the planned ones do, where that is more


class AdaptiveController(MeasuringController):
    """Takes what promises most tokens per second. One for an engine and its drafter.

    Without `by_evidence` nothing is decided by what was drafted, as rejection sampling asks: there, drafts that are
    kept because they are likely would come too often. `looks_back` and `stops` say what the drafter can do.
    """

    def __init__(self, costs: CostModel, by_evidence: bool = True, looks_back: bool = True, stops: bool = True):
        self.costs = costs
        self.selects_by_rule = by_evidence and stops
        self.looks = Looks(costs)
        self.trials = Trials(costs.errors)
        self.looks_back = looks_back
        self.stops = stops
        self.by_evidence = by_evidence
        self.is_timed = True  # what passes take, and so may be tried
        self.acceptance = AcceptanceModel()
        self.requests = Requests(self.acceptance)
        self.prospects = Prospects(costs, self.acceptance, self._gain_of)
        self.decisions = Decisions()
        self.selecting = Selecting()
        self._times = TimesOfSteps(costs)
        self._is_drafting = False
        self._trial: Plan | None = None  # the last plan, if it was one
        self.length = PlanLength()
        self.repayment = Repayment(costs)

    def leave_to_device(self) -> None:
        """A device runs rounds by itself: nobody looks back, sees a draft before it is verified, or times a trial."""
        self.looks_back = self.stops = self.selects_by_rule = self.is_timed = False

    @override
    def plan(self, candidates: Sequence[Candidate], num_steps: int = 1) -> Plan:
        self._begin_plan(candidates, num_steps)
        looking = LOOKING
        if not self._is_drafting:
            looking = self.prospects.share_of_looking(len(candidates), max(c.most for c in candidates))
        plain = self._times.of(len(candidates), 0)
        plain_seconds = plain.plain
        self.looks.share = looking
        self.looks.earn(num_steps, plain_seconds)
        if not looking:  # not even certain drafts would pay, if passes take what is thought
            nothing = [0] * len(candidates)
            trial = self._trial_of_rows(candidates, num_steps * plain_seconds)
            return Plan(nothing, num_steps=self.length.of(nothing)) if trial is None else trial
        num_known = len(self.requests)
        logits = self.requests.logits(candidates)
        if num_new := len(self.requests) - num_known:
            self.looks.advance(looking / LOOKING * _ADVANCE * num_new / len(candidates) * plain_seconds)
        counts, rate, deepest, stop_rule, lag_repaid = self._decided(candidates, logits)
        was_drafting, self._is_drafting = self._is_drafting, any(counts)
        if self._is_drafting:
            self.trials.drafts_are_made()
        if was_drafting and self._is_drafting and self.is_timed and not self.costs.overlaps:
            speed, expected = rate * plain_seconds / len(candidates), partial(self._expected, candidates, logits)
            proposal_seconds = self.costs.proposal_of_round(len(candidates))
            tried = self.trials.next(counts, speed, num_steps, expected, proposal_seconds, plain.rest_doubt)
            if tried is not None:
                self._trial = Plan(tried, num_steps=TRIAL_STEPS, is_trial=True)
                return self._trial
        elif not self._is_drafting:
            trial = self._trial_of_rows(candidates, num_steps * plain_seconds)
            if trial is not None:
                return trial
        self.selecting.is_ruled = stop_rule is not None and len(candidates) == 1
        (looks, glances), num_steps = self._look(candidates, deepest), self.length.of(deepest)
        drafting = [self.requests.of(c.sequence) for c, count in zip(candidates, deepest, strict=True) if count]
        if tries := self.acceptance.tries(drafting, len(candidates)):
            num_steps = min(_SOON, num_steps)
        plan = Plan(deepest, looks, stop_rule, counts, num_steps, glances=glances, lag_repaid=lag_repaid)
        plan.is_provisional, plan.takes_newcomers = tries, self.acceptance.requests_are_alike
        return plan

    @override
    def look(self, candidates: Sequence[Candidate], num_steps: int) -> tuple[Sequence[int], Sequence[int]]:
        self.looks.earn(num_steps, self._times.of(len(candidates), 0).plain, since_plan=True)
        return self._look(candidates, [0] * len(candidates))

    @property
    @override
    def looks_in(self) -> int:
        return self.looks.due

    @override
    def selects(self) -> bool:
        # A trial's passes are to have all of its rows.
        return self.by_evidence and self._trial is None and self.selecting.is_due()

    @override
    def select(self, sequences: Sequence[Hashable], evidence: Sequence[Sequence[float]]) -> list[int]:
        lengths = list(map(len, evidence))
        num_drafts = sum(lengths)
        if not (num_drafts and self.by_evidence):
            return lengths
        if not self.selecting.could_gain(times := self._times.of(len(sequences), num_drafts), num_drafts):
            return lengths
        chances = self.requests.chances_of(sequences, evidence)
        proposal = self.costs.proposal_of_round(len(lengths)) + times.drafting(lengths)
        return self.selecting.select(chances, times, proposal, self.costs.drafting_rounds)

    @override
    def observe_target(self, shape: PassShape, seconds: float) -> None:
        tries_rows = self._trial is not None and self._trial.tries_rows  # of no drafter
        self.costs.observe_target(shape, seconds, is_alone=tries_rows)

    @override
    def observe_drafts(
        self, sequence: Hashable, num_accepted: int, num_rejected: int, evidence: Sequence[float] | None = None
    ) -> None:
        self.acceptance.observe(self.requests.of(sequence), num_accepted, num_rejected, evidence)

    @override
    def observe_outcomes(self, sequence: Hashable, num_accepted: int, num_rejected: int) -> None:
        self.acceptance.count(self.requests.of(sequence), num_accepted, num_rejected)

    @override
    def expects(self, sequence: Hashable) -> float:
        return self.requests.expects(sequence)

    @override
    def observe_end(self, num_tokens: int, most_tokens: int) -> None:
        self.repayment.observe_end(num_tokens, most_tokens)

    @override
    def forget(self, sequence: Hashable) -> None:
        self.requests.forget(sequence)
        self.looks.forget(sequence)

    @property
    def num_requests(self) -> int:
        """The sequences that are remembered."""
        return len(self.requests)

    def _begin_plan(self, candidates: Sequence[Candidate], num_steps: int) -> None:
        self.prospects.count_plan()
        if self._trial is not None:  # what it has shown is to be known at once
            self._trial = None
            if num_steps < _HEARD:
                self.trials.was_cut_short(num_steps)
            self._times.expire()
            self.prospects.forget()
            self.decisions.forget()
        self._times.context = sum([c.context_len for c in candidates]) / len(candidates)

    def _look(self, candidates: Sequence[Candidate], counts: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """Whom of these to look back at, and of those whom to glance at, where others have so many drafts."""
        num_seen = [self.requests.num_seen(c.sequence) for c in candidates]
        return self.looks.choose(candidates, counts, num_seen) if self.looks_back else ((), ())

    def _decided(self, candidates: Sequence[Candidate], logits: Sequence[float]) -> Decision:
        """Who is alone, and like one before, goes by what was decided then, if it is repaid to catch up for that."""
        if len(candidates) > 1:
            return self._decide(candidates, logits)
        (candidate,) = candidates
        key = self._is_drafting, logits[0], candidate.most, candidate.context_len // ALIKE, self.costs.way
        # As if its drafter had run all of it.
        decision = self.decisions.of(key, lambda: self._decide([replace(candidate, lag=1)], logits))
        lag_repaid = decision.lag_repaid
        if lag_repaid is None or lag_repaid.repays(candidate.lag, candidate.num_left):
            return decision
        return Decision([0], 0.0, [0], None, lag_repaid)

    def _decide(self, candidates: Sequence[Candidate], logits: Sequence[float]) -> Decision:
        counts, rate = selection = self._worthwhile(candidates, logits)
        lag_repaid = self.repayment.lag_repaid(selection, self._plain_seconds_beaten(len(candidates)))
        deepest, stop_rule = counts, None
        if any(counts) and self.by_evidence and self.stops:
            tells = self.acceptance.spread > _TOLD_APART
            if tells:
                deepest = self._deeper(candidates, counts)
            if tells or self.selecting.pays:
                stop_rule = self._stop_rule(candidates, counts, deepest, rate)
        return Decision(counts, rate, deepest, stop_rule, lag_repaid)

    def _worthwhile(self, candidates: Sequence[Candidate], logits: Sequence[float]) -> Selection:
        """The drafts that promise most, of those who need not catch up, or for whom that is repaid."""
        num_seqs, most = len(candidates), max(c.most for c in candidates)
        if not self._is_drafting and not self.prospects.gain(num_seqs, max(logits), most):
            return Selection([0] * num_seqs, 0.0)  # not even if all were like the best
        chances = self.requests.chances(candidates, logits)
        selection = self._depths(chances)
        repaid = self.repayment.repaid(candidates, selection, self._plain_seconds_beaten(num_seqs))
        if all(repaid):
            return selection
        return self._depths([of if will else () for of, will in zip(chances, repaid, strict=True)])

    def _depths(self, chances: Sequence[Sequence[float]]) -> Selection:
        """The drafts of each sequence that promise most, of those with these chances."""
        times = self._times.of(len(chances), sum(map(len, chances)))
        passes, proposal = (times.first, times.later) if times.later else (), self.costs.proposal_of_round(len(chances))
        plain, overlaps = times.plain / self._worth(times), self.costs.overlaps
        return select(chances, times.verify, passes, proposal_seconds=proposal, plain_seconds=plain, overlaps=overlaps)

    def _worth(self, times: StepTimes) -> float:
        """How many times as fast as plain decoding is to be what drafts are made for."""
        if not self._is_drafting:
            return 1.0 + max(_TO_BEGIN, _DOUBT_TO_BEGIN * times.doubt)
        early = _EARLY / math.sqrt(16 + self.acceptance.num_outcomes)
        return 1.0 + max(_TO_GO_ON, _DOUBT_TO_GO_ON * times.doubt) - early

    def _gain_of(self, chances: Sequence[Sequence[float]]) -> float:
        """How many times as fast as plain decoding drafts with these chances are; 0 where none are worthwhile."""
        counts, rate = self._depths(chances)
        return rate * self._times.of(len(chances), 0).plain / len(chances) if any(counts) else 0.0

    def _trial_of_rows(self, candidates: Sequence[Candidate], seconds: float) -> Plan | None:
        """So many drafts of each, where it should be found out what passes with drafts take, if that is due; nobody has
        drafted for so long.
        """
        if not (self.by_evidence and self.is_timed) or self.costs.overlaps or self.costs.following is not None:
            return None  # nobody would listen; and heads would fall behind
        num_seqs = len(candidates)
        counts = self.trials.next_rows(
            num_seqs,
            seconds,
            lambda by: hopeful(*self._expected(candidates, self.requests.logits(candidates)), by),
            lambda num_rows: price_of_rows(self.costs, self._times.of(num_seqs, num_rows), num_seqs, num_rows),
        )
        if counts is None:
            return None
        tried = [min(count, c.most) for count, c in zip(counts, candidates, strict=True)]
        self._trial = Plan(tried, num_steps=ROWS_TRIAL_STEPS, is_trial=True, tries_rows=True)
        return self._trial

    def _expected(
        self, candidates: Sequence[Candidate], logits: Sequence[float]
    ) -> tuple[list[Sequence[float]], StepTimes]:
        """Of all drafts that there could be, what comes of them, and what steps with them take."""
        chances = self.requests.chances(candidates, logits)
        return chances, self._times.of(len(candidates), sum(map(len, chances)))

    def _plain_seconds_beaten(self, num_seqs: int) -> float:
        """A plain step's, if plain decoding were quicker by as much as drafts are to be worth."""
        times = self._times.of(num_seqs, 0)
        return times.plain / max(1.0, self._worth(times))

    def _deeper(self, candidates: Sequence[Candidate], counts: Sequence[int]) -> list[int]:
        """As deep as would pay if evidence turns out well; the stop rule sees to it when it does not."""
        surplus = self.acceptance.spread
        chances = self.requests.chances(candidates, [logit + surplus for logit in self.requests.logits(candidates)])
        hoped = [of if count else () for of, count in zip(chances, counts, strict=True)]
        return list(map(max, counts, self._depths(hoped).counts))

    def _stop_rule(
        self, candidates: Sequence[Candidate], counts: Sequence[int], deepest: Sequence[int], rate: float
    ) -> StopRule:
        """Of drafts that are `counts` in the mean, and up to `deepest`, as evidence turns out."""
        requests = [self.requests.of(c.sequence) for c, count in zip(candidates, counts, strict=True) if count]
        num_drafts, most = sum(counts), sum(deepest)
        times = self._times.of(len(candidates), most)
        row_seconds = (times.verify[num_drafts] - times.verify[0]) / num_drafts  # as steps go, between two nodes of f
        if most > num_drafts:
            beyond = (times.verify[most] - times.verify[num_drafts]) / (most - num_drafts)
            row_seconds += _BEYOND * max(0.0, beyond - row_seconds)
        return StopRule.of(self.acceptance, requests, rate * row_seconds, rate * times.later[len(requests)])
