"""Drafting that takes what promises most tokens per second, by measured cost and acceptance."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from typing_extensions import override

from specpaged.speculation.acceptance import AcceptanceModel, RequestAcceptance
from specpaged.speculation.controller import Candidate, Plan
from specpaged.speculation.cost_model import CostModel
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
_TOLD_APART = 0.1  # in logits: of less spread, nothing is to be decided by a draft's evidence


class AdaptiveController:
    """Takes what promises most tokens per second. One for an engine and its drafter.

    Sequences are known by identity, until they are forgotten. Without `by_evidence` nothing is decided by what was
    drafted, as rejection sampling asks: there, drafts that are kept because they are likely would come too often.
    """

    def __init__(self, costs: CostModel, by_evidence: bool = True):
        self.costs = costs
        self.by_evidence = by_evidence
        self.acceptance = AcceptanceModel()
        self._requests: dict[Hashable, RequestAcceptance] = {}
        self._paying: dict[tuple[int, int], bool] = {}
        self._age = 0  # steps since what could pay was asked anew
        self._is_drafting = False
        self._credit = 0.0  # seconds that may be spent on looking back

    @override
    def plan(self, candidates: Sequence[Candidate]) -> Plan:
        if not self._could_pay(candidates):
            return Plan([0] * len(candidates))
        if self.costs.draft is None:  # drafts come for nothing
            return Plan([candidate.most for candidate in candidates])
        num_known = len(self._requests)
        chances = [self.acceptance.chances(self._request(c.sequence), c.most) for c in candidates]
        num_new = len(self._requests) - num_known
        if num_new:
            self._credit += _ADVANCE * num_new / len(candidates) * self.costs.target.of(len(candidates))
        counts, rate = self._depths(candidates, chances)
        self._is_drafting = any(counts)
        stop_rule = None
        if self.by_evidence and self._is_drafting and self.acceptance.spread > _TOLD_APART:
            counts = self._deeper(candidates, counts)
            stop_rule = self._stop_rule(candidates, counts, rate)
        return Plan(counts, self._looks_back(candidates, counts), stop_rule)

    @override
    def select(self, candidates: Sequence[Candidate], evidence: Sequence[Sequence[float]]) -> list[int]:
        if not self.by_evidence:
            return [len(of_draft) for of_draft in evidence]
        chances = [
            self.acceptance.chances_of(self._request(c.sequence), of_draft)
            for c, of_draft in zip(candidates, evidence, strict=True)
        ]
        num_drafts = sum(map(len, evidence))
        return select(chances, self._verify_seconds(candidates, num_drafts)).counts

    @override
    def observe_drafts(
        self, sequence: Hashable, outcomes: Sequence[bool], evidence: Sequence[float] | None = None
    ) -> None:
        self.acceptance.observe(self._request(sequence), outcomes, evidence)

    @override
    def observe_target(self, num_rows: int, num_kv_tokens: float, seconds: float) -> None:
        self._credit += LOOKING * seconds
        self.costs.observe_target(num_rows, num_kv_tokens, seconds)

    @override
    def observe_proposal(self, rows_of_passes: Sequence[int], num_kv_tokens: float, seconds: float) -> None:
        self._credit += LOOKING * seconds
        self.costs.observe_proposal(rows_of_passes, num_kv_tokens, seconds)

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
        self._age += 1
        if self._age >= _MEMORY:
            self._age = 0
            self._paying.clear()
        answer = self._paying.get((batch_size, most))
        if answer is None:
            certain = [[_CERTAIN**n for n in range(1, most + 1)]] * batch_size
            answer = self._paying[batch_size, most] = any(self._depths(candidates, certain).counts)
        return answer

    def _depths(self, candidates: Sequence[Candidate], chances: Sequence[Sequence[float]]) -> Selection:
        """The drafts of each candidate that promise most, of those with these chances."""
        batch_size, costs = len(candidates), self.costs
        worth = 1.0 + _TO_BEGIN
        if self._is_drafting:
            worth = 1.0 - max(_TO_STOP, _TO_STOP_EARLY / math.sqrt(16 + self.acceptance.num_outcomes))
        verify = self._verify_seconds(candidates, sum(map(len, chances)), worth, costs.seconds_per_proposal)
        if costs.draft is None:
            return select(chances, verify)
        # A sequence that has not drafted for long catches up once: what counts is what it will be from then on.
        rows = [math.ceil(n * _USUAL_LAG) for n in range(batch_size + 1)]
        draft = costs.draft.table(rows[-1])
        per_row = self._mean_context(candidates) * costs.draft.seconds_per_kv_token
        first = [worth * (draft[n] + n * per_row) for n in rows]
        later = [worth * (draft[n] + n * per_row) for n in range(batch_size + 1)]
        return select(chances, verify, (first, later))

    def _deeper(self, candidates: Sequence[Candidate], counts: Sequence[int]) -> list[int]:
        """As deep as would pay if evidence turns out well; the stop rule sees to it when it does not."""
        model = self.acceptance
        hoped = [
            model.chances(self._request(c.sequence), c.most if count else 0, model.spread)
            for c, count in zip(candidates, counts, strict=True)
        ]
        return list(map(max, counts, self._depths(candidates, hoped).counts))

    def _stop_rule(self, candidates: Sequence[Candidate], counts: Sequence[int], rate: float) -> StopRule:
        model, costs = self.acceptance, self.costs
        requests = [self._request(c.sequence) for c, count in zip(candidates, counts, strict=True) if count]
        num_rows = len(candidates) + sum(counts)
        context = self._mean_context(candidates)
        row_seconds = costs.target.of(num_rows + 1, context) - costs.target.of(num_rows, context)
        return StopRule(
            slope=model.slope,
            intercepts=model.intercepts,
            leads=[model.request_weight * model.lead(request) for request in requests],
            expected=[model.expected(request) for request in requests],
            row_tokens=rate * max(0.0, row_seconds),
            pass_tokens=rate * costs.draft.of(len(requests), context),
        )

    def _verify_seconds(
        self, candidates: Sequence[Candidate], num_drafts: int, factor: float = 1.0, more: float = 0.0
    ) -> list[float]:
        """Of a step with 0, 1, ... num_drafts drafts to verify; with any, `factor` times, and `more` besides."""
        batch_size, costs = len(candidates), self.costs
        rows = costs.target.table(batch_size + num_drafts)
        per_row = self._mean_context(candidates) * costs.target.seconds_per_kv_token
        rest = costs.seconds_per_step
        plain = rows[batch_size] + batch_size * per_row + rest
        return [plain] + [
            factor * (rows[n] + n * per_row + rest + more) for n in range(batch_size + 1, batch_size + num_drafts + 1)
        ]

    @staticmethod
    def _mean_context(candidates: Sequence[Candidate]) -> float:
        return sum([c.context_len for c in candidates]) / len(candidates)

    def _looks_back(self, candidates: Sequence[Candidate], counts: Sequence[int]) -> list[int]:
        """Whom there is credit to look back at, of those who do not draft: the ones with the shortest lag.

        Where others draft, their first pass has room for a few rows more; else it takes a pass of its own, for which a
        few tokens should have come together. Who has been left too far behind for the credit is given up.
        """
        is_alone = not any(counts)
        idle = [
            (candidate.lag, i)
            for i, (candidate, count) in enumerate(zip(candidates, counts, strict=True))
            if not count and candidate.most and (candidate.lag >= _SHORTEST_LOOK or not is_alone)
        ]
        rows = sum(candidate.lag for candidate, count in zip(candidates, counts, strict=True) if count)
        before = self.costs.draft.of(rows) - (self.costs.seconds_per_proposal if is_alone else 0.0)
        looks: list[int] = []
        spent = 0.0
        for lag, i in sorted(idle):
            rows += lag
            seconds = self.costs.draft.of(rows) - before
            if seconds > self._credit:
                break
            looks.append(i)
            spent = seconds
        self._credit -= spent
        return looks
