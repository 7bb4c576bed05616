"""Who drafts for whom, where lookups and a model draft together: what promises most for its time."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from typing_extensions import override

from specpaged.speculation.acceptance import AcceptanceModel, logit
from specpaged.speculation.adaptive import AdaptiveController
from specpaged.speculation.controller import Candidate, MeasuringController, Plan
from specpaged.speculation.cost_model import CostModel
from specpaged.speculation.lookup_choice import LookupChoice
from specpaged.speculation.pass_seconds import PassShape
from specpaged.speculation.requests import Requests
from specpaged.speculation.selection import select
from specpaged.speculation.step_times import StepTimes, TimesOfSteps
from specpaged.speculation.stop_rule import StopRule

_PLANNED = 8  # steps that a plan is good for where no model drafts
_FORGETTING, _PRIOR_DRAFTS = 0.99, 8.0  # of outcomes; and how many are taken to have come as expected
_CONFIDENT = 0.8  # chance of a draft of a lookup's that is taken, as long as little is known


class CombinedController(MeasuringController):
    """One acceptance model for each lookup, and an AdaptiveController for the model, if there is one.

    Of a sequence the model promises

        sum over j of  (chance_j - row_tokens)  -  its share of the proposal, in tokens

    by that controller's plan, and nothing where that is not to draft; time is worth tokens at the rate that the plan
    comes to. What a lookup has found promises likewise (LookupChoice), but for a proposal: it takes next to no time.
    Each is calibrated by what came of its own drafts; lookups', whether or not they were taken, as they are always
    made. The model's chances are those where lookups have found too little, as that is where it drafts.

    A lookup drafts by the known tokens alone: to choose by its evidence, and cut by it, changes no distribution, not
    that of rejection sampling either. `follows` says that the model runs what the target has run in any case, as heads
    do: then that pass is no part of what a sequence saves.
    """

    def __init__(self, costs: CostModel, num_lookups: int, model: AdaptiveController | None, follows: bool = False):
        self.costs = costs
        self.model = model
        self.follows = follows
        self.lookups = [_LookupAcceptance() for _ in range(num_lookups)]
        self._times = TimesOfSteps(costs)

    @property
    def selects_by_rule(self) -> bool:
        """See Controller: lookups' drafts are cut by their rules."""
        return self.model is None or self.model.selects_by_rule

    @property
    def num_requests(self) -> int:
        """The sequences that are remembered."""
        models = self.lookups if self.model is None else [*self.lookups, self.model]
        return max(len(model.requests) for model in models)

    @override
    def plan(self, candidates: Sequence[Candidate], num_steps: int = 1) -> Plan:
        if self.model is None:
            plan = Plan([0] * len(candidates), num_steps=_PLANNED)
        else:
            plan = self.model.plan([c if c.model_drafts else replace(c, most=0) for c in candidates], num_steps)
            if plan.is_trial:  # of steps with these drafts alone
                return plan
        self._times.context = sum([c.context_len for c in candidates]) / len(candidates)
        plan.lookups = self._choices(candidates, list(plan.without_rule) or plan.num_draft_tokens)
        return plan

    @override
    def selects(self) -> bool:
        return self.model is not None and self.model.selects()

    @override
    def select(self, sequences: Sequence[Hashable], evidence: Sequence[Sequence[float]]) -> list[int]:
        return self.model.select(sequences, evidence)

    @override
    def observe_drafts(
        self, sequence: Hashable, num_accepted: int, num_rejected: int, evidence: Sequence[float] | None = None
    ) -> None:
        self.model.observe_drafts(sequence, num_accepted, num_rejected, evidence)

    @override
    def observe_outcomes(self, sequence: Hashable, num_accepted: int, num_rejected: int) -> None:
        self.model.observe_outcomes(sequence, num_accepted, num_rejected)

    @override
    def expects(self, sequence: Hashable) -> float | None:
        return None if self.model is None else self.model.expects(sequence)

    @override
    def observe_target(self, shape: PassShape, seconds: float) -> None:
        if self.model is not None:
            self.model.observe_target(shape, seconds)
        else:
            super().observe_target(shape, seconds)

    @override
    def observe_lookup(
        self, lookup: int, sequence: Hashable, num_accepted: int, num_rejected: int, evidence: Sequence[float]
    ) -> None:
        self.lookups[lookup].observe(sequence, num_accepted, num_rejected, evidence)

    @override
    def observe_end(self, num_tokens: int, most_tokens: int) -> None:
        if self.model is not None:
            self.model.observe_end(num_tokens, most_tokens)

    @override
    def forget(self, sequence: Hashable) -> None:
        for lookup in self.lookups:
            lookup.requests.forget(sequence)
        if self.model is not None:
            self.model.forget(sequence)

    def _choices(self, candidates: Sequence[Candidate], counts: Sequence[int]) -> list[LookupChoice | None]:
        """Of each, when it takes a lookup's draft in place of so many of the model's."""
        num_seqs, num_drafts = len(candidates), sum(counts)
        times = self._times.of(num_seqs, max(num_seqs, num_drafts, sum([c.most for c in candidates])))
        most = list(map(max, counts, self._depths(candidates, times)))
        num_rows = sum(most)
        chances = [self._chances(c, count) for c, count in zip(candidates, counts, strict=True)]
        proposal = self._proposal_seconds(times, counts)
        step_seconds = times.verify[num_drafts] + proposal if num_drafts else times.plain
        rate = (num_seqs + sum(map(sum, chances))) / step_seconds
        # As steps go with so many rows: what one more takes beyond them says nothing of those that are replaced.
        row_tokens = max(0.0, rate * (times.verify[num_rows] - times.verify[0]) / num_rows) if num_rows else 0.0
        share = rate * proposal / max(1, sum(map(bool, counts)))
        rules = [
            of.calibrated(StopRule.of(of.acceptance, [of.requests.of(c.sequence) for c in candidates], row_tokens, 0.0))
            for of in self.lookups
        ]
        return [
            LookupChoice(depth, max(0.0, sum(of) - len(of) * row_tokens - share) if of else 0.0, rules, row)
            if depth
            else None
            for row, (depth, of) in enumerate(zip(most, chances, strict=True))
        ]

    def _depths(self, candidates: Sequence[Candidate], times: StepTimes) -> list[int]:
        """How deep lookups' drafts are worth their rows where they stand as they mostly do; 1 at least."""
        chance = max(_CONFIDENT, *(of.acceptance.mean for of in self.lookups))
        chances = [[chance ** (1 + j) for j in range(c.most)] for c in candidates]
        counts = select(chances, times.verify).counts
        return [min(c.most, max(1, count)) for c, count in zip(candidates, counts, strict=True)]

    def _chances(self, candidate: Candidate, count: int) -> Sequence[float]:
        """Of so many drafts of the model's."""
        if not count:
            return ()
        request = self.model.requests.of(candidate.sequence)
        return self.model.acceptance.chances(self.model.acceptance.expected_logit(request), count)

    def _proposal_seconds(self, times: StepTimes, counts: Sequence[int]) -> float:
        """What is saved where nobody has so many drafts of the model's."""
        num_drafting = sum(map(bool, counts))
        if not num_drafting:
            return 0.0
        later = [times.later[sum([count > depth for count in counts])] for depth in range(1, max(counts))]
        first = times.first[num_drafting]
        if self.follows:
            first = self.costs.first_share * times.later[num_drafting]
        return self.costs.proposal_of_round(len(counts)) + first + sum(later)


class _LookupAcceptance:
    """How the drafts of a lookup fare.

    What a lookup says is a count, of texts that may be few: it can be far from how often its drafts stand, in the same
    direction for all. Gradient descent takes hundreds of outcomes for that. So what they have in common is heard at
    once: by how much, in logits, what was expected of the last ones falls short of what came, in the mean.
    """

    def __init__(self) -> None:
        self.acceptance = AcceptanceModel()
        self.requests = Requests(self.acceptance)
        self._num_seen = self._num_expected = self._num_stood = 0.0  # drafts, older ones for less

    def observe(self, sequence: Hashable, num_accepted: int, num_rejected: int, evidence: Sequence[float]) -> None:
        """See Controller.observe_lookup."""
        request, num_drafts = self.requests.of(sequence), num_accepted + num_rejected
        rule = StopRule.of(self.acceptance, [request], 0.0, 0.0)
        for j in range(num_drafts):
            expected = rule.chance(1.0, j, evidence[j], 0)
            self._num_seen = _FORGETTING * self._num_seen + 1.0
            self._num_expected = _FORGETTING * self._num_expected + expected
            self._num_stood = _FORGETTING * self._num_stood + (j < num_accepted)
        self.acceptance.observe(request, num_accepted, num_rejected, evidence)

    def calibrated(self, rule: StopRule) -> StopRule:
        """The rule with what all outcomes have in common."""
        if not self._num_seen:
            return rule
        expected = self._num_expected / self._num_seen
        stood = (self._num_stood + _PRIOR_DRAFTS * expected) / (self._num_seen + _PRIOR_DRAFTS)
        offset = logit(stood) - logit(expected)
        return replace(rule, leads=[lead + offset for lead in rule.leads])
