"""Drafting that takes what promises most tokens per second, by measured cost and acceptance."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from typing_extensions import override

from specpaged.speculation.acceptance import AcceptanceModel, RequestAcceptance
from specpaged.speculation.controller import Candidate, Plan
from specpaged.speculation.cost_model import CostModel, PassShape
from specpaged.speculation.selection import Selection, select
from specpaged.speculation.stop_rule import StopRule

LOOKING = 0.0075  # of the time, at most, goes into looking whether sequences that do not draft should
_CERTAIN = 0.97  # the probability of a draft that nothing is to be hoped beyond
_MEMORY = 256  # steps that the answer to "could it pay?" is good for
_ADVANCE = 0.5  # of its share of a plain step, for a new request, of which nothing is known yet
_USUAL_LAG = 1.25  # tokens that the drafter has not run, of a sequence that drafts in every step, in the mean
_SHORTEST_LOOK = 4  # tokens: a pass of a few rows costs hardly more than one of one
# Drafts must promise so much more tokens per second than plain decoding to begin; once they are made, they go on until
# they promise so much less, and the more so the fewer have had an outcome: noise is not to switch them on and off, and
# who has stopped has to catch up first.
_TO_BEGIN = 0.01
_TO_STOP = 0.015
_TO_STOP_EARLY = 0.4  # divided by the square root of the number of outcomes
_PLAN_EVERY = 4  # steps of a batch that is the same
_REPAID_WITHIN = 64  # steps
_USES = 64  # of a table of times, until it is made anew
_TOLD_APART = 0.1  # in logits: of less spread, nothing is to be decided by a draft's evidence


@dataclass(slots=True)
class _Times:
    """Seconds of steps of one batch size."""

    context: float
    verify: list[float]  # [n]: with n drafts to verify, whatever drafting them took
    first: list[float]  # [n]: of the draft's first pass for n sequences; nothing where no model drafts
    later: list[float]  # [n]: of each further one
    uses: int = 0

    @classmethod
    def of(cls, costs: CostModel, batch_size: int, most_drafts: int, context: float) -> _Times:
        """By the costs as they are known now."""
        target, draft = costs.target, costs.draft
        rows = target.table(batch_size + most_drafts)
        per_row = context * target.per_row_and_kv_token
        rest = costs.seconds_per_step + batch_size * (target.per_sequence + context * target.per_kv_token)
        verify = [rows[n] + n * per_row + rest for n in range(batch_size, batch_size + most_drafts + 1)]
        if draft is None:
            return cls(context, verify, [], [])
        # A sequence that has not drafted for long catches up once: what counts is what it will be from then on.
        num_first = [math.ceil(n * _USUAL_LAG) for n in range(batch_size + 1)]
        rows = draft.table(num_first[-1])
        per_sequence = draft.per_sequence + context * (draft.per_kv_token + draft.per_row_and_kv_token)
        first = [rows[num_rows] + n * per_sequence for n, num_rows in enumerate(num_first)]
        later = [rows[n] + n * per_sequence for n in range(batch_size + 1)]
        return cls(context, verify, first, later)


class AdaptiveController:
    """Takes what promises most tokens per second. One for an engine and its drafter.

    Sequences are known by identity, until they are forgotten. Without `by_evidence` nothing is decided by what was
    drafted, as rejection sampling asks: there, drafts that are kept because they are likely would come too often.
    `looks_back` and `stops` say what the drafter can do: look back, and go no deeper than a rule says.
    """

    def __init__(self, costs: CostModel, by_evidence: bool = True, looks_back: bool = True, stops: bool = True):
        self.costs = costs
        self.looks_back = looks_back
        self.stops = stops
        self.by_evidence = by_evidence
        self.acceptance = AcceptanceModel()
        self._requests: dict[Hashable, RequestAcceptance] = {}
        self._paying: dict[tuple[int, int], bool] = {}
        self._age = 0  # steps
        self._asked = 0  # when what could pay was asked anew
        self._sequences: list[Hashable] = []  # of the last plan, which is good for a few steps
        self._counts: list[int] = []
        self._rule: StopRule | None = None
        self._times_of: dict[int, _Times] = {}  # by batch size
        self._is_drafting = False
        self._credit = 0.0  # seconds that may be spent on looking back

    @override
    def plan(self, candidates: Sequence[Candidate]) -> Plan:
        sequences = [c.sequence for c in candidates]
        if self._age % _PLAN_EVERY and sequences == self._sequences:
            self._age += 1
            return Plan(self._counts, (), self._rule)
        self._age += 1
        plan = self._plan(candidates)
        self._sequences, self._counts, self._rule = sequences, plan.num_draft_tokens, plan.stop_rule
        return plan

    def _plan(self, candidates: Sequence[Candidate]) -> Plan:
        if not self._could_pay(candidates):
            self._is_drafting = False
            return Plan([0] * len(candidates))
        if self.costs.draft is None:  # drafts come for nothing
            return Plan([candidate.most for candidate in candidates])
        num_known = len(self._requests)
        chances = [self.acceptance.chances(self._request(c.sequence), c.most) for c in candidates]
        num_new = len(self._requests) - num_known
        if num_new:
            self._credit += _ADVANCE * num_new / len(candidates) * self._times(candidates, 0).verify[0]
        counts, rate = self._depths(candidates, chances)
        if any(counts) and not self._repays(candidates, counts, rate):
            counts = [0] * len(candidates)
        self._is_drafting = any(counts)
        stop_rule = None
        if self.by_evidence and self.stops and self._is_drafting and self.acceptance.spread > _TOLD_APART:
            counts = self._deeper(candidates, counts)
            stop_rule = self._stop_rule(candidates, counts, rate)
        return Plan(counts, self._looks_back(candidates, counts), stop_rule)

    @override
    def select(self, candidates: Sequence[Candidate], evidence: Sequence[Sequence[float]]) -> list[int]:
        num_drafts = sum(map(len, evidence))
        if not self.by_evidence or not num_drafts:
            return [len(of_draft) for of_draft in evidence]
        chances = [
            self.acceptance.chances_of(self._request(c.sequence), of_draft) if of_draft else ()
            for c, of_draft in zip(candidates, evidence, strict=True)
        ]
        times = self._times(candidates, num_drafts)
        # What the proposal has taken is part of the step: without it, rows would seem dearer than they are.
        spent = self.costs.seconds_per_proposal
        if times.later:
            for depth in range(max(map(len, evidence))):
                spent += times.later[sum([len(of_draft) > depth for of_draft in evidence])]
        return select(chances, times.verify, proposal_seconds=spent).counts

    @override
    def observe_drafts(
        self, sequence: Hashable, outcomes: Sequence[bool], evidence: Sequence[float] | None = None
    ) -> None:
        self.acceptance.observe(self._request(sequence), outcomes, evidence)

    @override
    def observe_target(self, shape: PassShape, seconds: float) -> None:
        self._credit += LOOKING * seconds
        self.costs.observe_target(shape, seconds)

    @override
    def observe_proposal(self, passes: Sequence[PassShape], seconds: float) -> None:
        self._credit += LOOKING * seconds
        self.costs.observe_proposal(passes, seconds)

    @override
    def observe_rest(self, seconds: float) -> None:
        self.costs.observe_rest(seconds)

    @override
    def forget(self, sequence: Hashable) -> None:
        self._requests.pop(sequence, None)

    @property
    def num_requests(self) -> int:
        """The sequences that are remembered."""
        return len(self._requests)

    def _request(self, sequence: Hashable) -> RequestAcceptance:
        request = self._requests.get(sequence)
        if request is None:
            request = self._requests[sequence] = RequestAcceptance()
        return request

    def _could_pay(self, candidates: Sequence[Candidate]) -> bool:
        """Whether drafts that are next to certain would pay, in a batch of so many; asked anew now and then."""
        batch_size, most = len(candidates), max((c.most for c in candidates), default=0)
        if not most:
            return False
        if self._age - self._asked >= _MEMORY:
            self._asked = self._age
            self._paying.clear()
        answer = self._paying.get((batch_size, most))
        if answer is None:
            certain = [[_CERTAIN**n for n in range(1, most + 1)]] * batch_size
            answer = self._paying[batch_size, most] = any(self._depths(candidates, certain).counts)
        return answer

    def _depths(self, candidates: Sequence[Candidate], chances: Sequence[Sequence[float]]) -> Selection:
        """The drafts of each candidate that promise most, of those with these chances."""
        worth = 1.0 + _TO_BEGIN
        if self._is_drafting:
            worth = 1.0 - max(_TO_STOP, _TO_STOP_EARLY / math.sqrt(16 + self.acceptance.num_outcomes))
        times = self._times(candidates, sum(map(len, chances)))
        return select(
            chances,
            times.verify,
            (times.first, times.later) if times.later else (),
            proposal_seconds=self.costs.seconds_per_proposal,
            plain_seconds=times.verify[0] / worth,
        )

    def _repays(self, candidates: Sequence[Candidate], counts: Sequence[int], rate: float) -> bool:
        """Whether catching up with what has not been drafted for is repaid within some tens of steps."""
        backlog = sum([c.lag - 1 for c, count in zip(candidates, counts, strict=True) if count])
        if backlog <= _SHORTEST_LOOK * len(candidates):
            return True
        plain_seconds = self._times(candidates, 0).verify[0]
        gain = rate * plain_seconds / len(candidates) - 1.0  # of a step, in its own time
        return self.costs.draft.of_rows(backlog) < gain * _REPAID_WITHIN * plain_seconds

    def _deeper(self, candidates: Sequence[Candidate], counts: Sequence[int]) -> list[int]:
        """As deep as would pay if evidence turns out well; the stop rule sees to it when it does not."""
        model = self.acceptance
        hoped = [
            model.chances(self._request(c.sequence), c.most if count else 0, model.spread)
            for c, count in zip(candidates, counts, strict=True)
        ]
        return list(map(max, counts, self._depths(candidates, hoped).counts))

    def _stop_rule(self, candidates: Sequence[Candidate], counts: Sequence[int], rate: float) -> StopRule:
        model = self.acceptance
        requests = [self._request(c.sequence) for c, count in zip(candidates, counts, strict=True) if count]
        times = self._times(candidates, sum(counts) + 1)
        row_seconds = times.verify[sum(counts) + 1] - times.verify[sum(counts)]
        return StopRule(
            slope=model.slope,
            intercepts=model.intercepts,
            leads=[model.request_weight * request.lead for request in requests],
            expected=[model.expected(request) for request in requests],
            row_tokens=rate * max(0.0, row_seconds),
            pass_tokens=rate * times.later[len(requests)],
        )

    def _times(self, candidates: Sequence[Candidate], num_drafts: int) -> _Times:
        """Of steps of this batch. They are made anew now and then, and when contexts have grown."""
        batch_size = len(candidates)
        context = sum([c.context_len for c in candidates]) / batch_size
        times = self._times_of.get(batch_size)
        if (
            times is None
            or len(times.verify) <= num_drafts
            or times.uses >= _USES
            or abs(context - times.context) > 16 + 0.1 * times.context
        ):
            most = max(num_drafts, batch_size if times is None else len(times.verify) - 1)
            times = self._times_of[batch_size] = _Times.of(self.costs, batch_size, most, context)
        times.uses += 1
        return times

    def _looks_back(self, candidates: Sequence[Candidate], counts: Sequence[int]) -> list[int]:
        """Whom there is credit to look back at, of those who do not draft: the ones with the shortest lag.

        Where others draft, their first pass has room for a few rows more; else it takes a pass of its own, for which a
        few tokens should have come together. Who has been left too far behind for the credit is given up.
        """
        if not self.looks_back:
            return []
        is_alone = not any(counts)
        idle = [
            (candidate.lag, i)
            for i, (candidate, count) in enumerate(zip(candidates, counts, strict=True))
            if not count and candidate.most and candidate.lag > (_SHORTEST_LOOK if is_alone else 1)
        ]
        rows = sum(candidate.lag for candidate, count in zip(candidates, counts, strict=True) if count)
        draft = self.costs.draft
        before = -self.costs.seconds_per_proposal if is_alone else draft.of_rows(rows)
        looks: list[int] = []
        spent = 0.0
        for lag, i in sorted(idle):
            rows += lag - 1  # the newest token has no successor yet
            seconds = draft.of_rows(rows) - before
            if seconds > self._credit:
                break
            looks.append(i)
            spent = seconds
        self._credit -= spent
        return looks
