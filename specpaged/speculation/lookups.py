"""Drafts that no model makes, as far as they are worth what it takes to look for them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from typing_extensions import override

from specpaged.speculation.adaptive import AdaptiveController
from specpaged.speculation.controller import Candidate, Plan
from specpaged.speculation.cost_model import CostModel
from specpaged.speculation.step_times import StepTimes
from specpaged.speculation.stop_rule import StopRule
from specpaged.speculation.worth import TRY_STEPS, Worth


class LookupController(AdaptiveController):
    """Of a drafter whose passes nobody knows: lookups, which take next to nothing, or somebody else's, which may take
    long.

    How much it will find, and how likely that is to stand, nobody can foresee. So it is asked for all that it may
    find, which evidence then cuts; and for nothing where its proposals have not been worth their time (Worth), but for
    a few steps now and then.
    """

    def __init__(self, costs: CostModel, by_evidence: bool = True, follows: bool = False):
        super().__init__(costs, by_evidence, looks_back=False, stops=False)
        self.selects_by_rule = by_evidence
        self.follows = follows  # the drafter reads what the target has run: see DraftPlanner
        self.worth = Worth()
        self._unseen: dict[Hashable, int] = {}  # without evidence: drafts to verify of each sequence

    @override
    def plan(self, candidates: Sequence[Candidate], num_steps: int = 1) -> Plan:
        self._begin_plan(candidates, num_steps)
        num_seqs, most = len(candidates), [candidate.most for candidate in candidates]
        plain_seconds = self._times.of(num_seqs, 0).plain
        self.worth.earn(num_steps * plain_seconds)
        pays = self.worth.pays
        if not self.by_evidence:
            counts = self._depths(self.requests.chances(candidates, self.requests.logits(candidates))).counts
            self._unseen.update(zip([c.sequence for c in candidates], counts, strict=True))
            pays = any(counts)
        could_pay = self.prospects.share_of_looking(num_seqs, max(most)) > 0.0
        price = TRY_STEPS * self.costs.proposal_of_round(num_seqs)
        if could_pay and (pays or self.worth.tries(price)):
            good_for = self.length.of(most) if pays else TRY_STEPS
            self.trials.drafts_are_made()
            return Plan(most, (), self._lookup_rule(candidates), most, good_for, is_provisional=not pays)
        trial = None if self.follows else self._trial_of_rows(candidates, num_steps * plain_seconds)
        if trial is not None:
            return trial
        nothing = [0] * num_seqs
        good_for, until = self.length.of(nothing), self.worth.steps_until_try(price, plain_seconds)
        if could_pay and until < good_for:
            return Plan(nothing, num_steps=until, is_provisional=True)
        return Plan(nothing, num_steps=good_for)

    @override
    def selects(self) -> bool:
        if not self.by_evidence:
            return bool(self._unseen)
        return self.selecting.is_due() or not self.worth.is_known

    @override
    def select(self, sequences: Sequence[Hashable], evidence: Sequence[Sequence[float]]) -> list[int]:
        lengths = list(map(len, evidence))
        num_seqs, num_drafts = len(lengths), sum(lengths)
        if not num_drafts:
            return lengths
        if not self.by_evidence:  # what was planned before anything was drafted
            return [min(n, self._unseen.get(s, n)) for n, s in zip(lengths, sequences, strict=True)]
        times, proposal = self._times.of(num_seqs, num_drafts), self.costs.proposal_of_round(num_seqs)
        counts, chances = lengths, self.requests.chances_of(sequences, evidence)
        if self.selecting.could_gain(times, num_drafts):
            counts = self.selecting.select(chances, times, proposal, self.costs.drafting_rounds)
        tokens = 1.0 + sum([sum(of[:count]) for of, count in zip(chances, counts, strict=True)]) / num_seqs
        self._add(times, tokens, sum(counts), proposal)
        return counts

    def observe_proposed(self, num_seqs: int, found: bool) -> None:
        """A proposal for so many has found something for somebody, or nothing for anybody."""
        if self.worth.count(found):
            self._add(self._times.of(num_seqs, 0), 1.0, 0, self.costs.proposal_of_round(num_seqs))

    @override
    def forget(self, sequence: Hashable) -> None:
        super().forget(sequence)
        self._unseen.pop(sequence, None)

    def _add(self, times: StepTimes, tokens: float, num_drafts: int, proposal: float) -> None:
        """To what proposals are worth: a step with so many drafts, of so many tokens a sequence."""
        of_step, of_empty = [
            max(verify, proposal) if self.costs.overlaps else verify + proposal
            for verify in (times.verify[num_drafts], times.verify[0])
        ]
        self.worth.add(tokens, of_step / times.plain, of_empty / times.plain)

    def _lookup_rule(self, candidates: Sequence[Candidate]) -> StopRule | None:
        """It keeps about those that were selected lately."""
        if not self.by_evidence:
            return None
        requests, num_seqs = [self.requests.of(c.sequence) for c in candidates if c.most], len(candidates)
        num_drafts = round(self.selecting.num_drafts * num_seqs)
        further = 1 + num_drafts // 2
        times = self._times.of(num_seqs, num_drafts + further)
        row_seconds = (times.verify[num_drafts + further] - times.verify[num_drafts]) / further
        rate = self.selecting.speed * num_seqs / times.plain
        return StopRule.of(self.acceptance, requests, rate * row_seconds, 0.0)
