"""Drafts that no model makes, as far as they are worth what it takes to look for them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from typing_extensions import override

from specpaged.speculation.adaptive import AdaptiveController
from specpaged.speculation.controller import Candidate, Plan
from specpaged.speculation.cost_model import CostModel
from specpaged.speculation.stop_rule import StopRule
from specpaged.speculation.worth import TRY_STEPS, Worth


class LookupController(AdaptiveController):
    """Of a drafter whose passes nobody knows: lookups, which take next to nothing, or somebody else's, which may take
    long.

    How much it will find, and how likely that is to stand, nobody can foresee. So it is asked for all that it may
    find, which evidence then cuts; and for nothing where its proposals have not been worth their time (Worth), but for
    a few steps now and then.
    """

    def __init__(self, costs: CostModel, by_evidence: bool = True):
        super().__init__(costs, by_evidence, looks_back=False, stops=False)
        self.selects_by_rule = by_evidence
        self.worth = Worth()
        self._asks = self._tries = False  # whether it is asked, and to find out whether it is worth it
        self._unseen: dict[Hashable, int] = {}  # without evidence: drafts to verify of each sequence

    @override
    def plan(self, candidates: Sequence[Candidate], num_steps: int = 1) -> Plan:
        self._begin_plan(candidates, num_steps)
        num_seqs, most = len(candidates), [candidate.most for candidate in candidates]
        seconds = num_steps * self._times.of(num_seqs, 0).plain
        logits = self._logits(candidates)
        self._tries = not self.worth.pays
        if not self.by_evidence:
            counts = self._depths(self._chances(candidates, logits)).counts
            self._unseen = {c.sequence: count for c, count in zip(candidates, counts, strict=True)}
            self._tries = not any(counts)
        self._asks = self.prospects.share_of_looking(num_seqs, max(most)) > 0.0
        if self._asks and self._tries:
            self._asks = self.worth.tries(seconds, TRY_STEPS * self.costs.proposal_of_round(num_seqs))
        if self._asks:
            num_steps = TRY_STEPS if self._tries else self.length.of(most)
            return Plan(most, (), self._lookup_rule(candidates), most, num_steps, is_provisional=self._tries)
        nothing = [0] * num_seqs
        trial = self._trial_of_rows(candidates, logits, seconds)
        return Plan(nothing, num_steps=self.length.of(nothing)) if trial is None else trial

    @override
    def selects(self) -> bool:
        if not self.by_evidence:
            return bool(self._unseen)
        return self._asks and (self.selecting.is_due() or not self.worth.is_known)

    @override
    def select(self, sequences: Sequence[Hashable], evidence: Sequence[Sequence[float]]) -> list[int]:
        lengths = list(map(len, evidence))
        if not lengths:
            return lengths
        num_seqs, num_drafts = len(lengths), sum(lengths)
        if not self.by_evidence:  # what was planned before anything was drafted
            return [min(n, self._unseen.get(s, n)) for n, s in zip(lengths, sequences, strict=True)]
        times, proposal = self._times.of(num_seqs, num_drafts), self.costs.proposal_of_round(num_seqs)
        counts, chances = lengths, self._chances_of(sequences, evidence)
        if self.selecting.could_gain(times, num_drafts):
            counts = self.selecting.select(chances, times, proposal, self.costs.drafting_rounds)
        tokens = num_seqs + sum([sum(of[:count]) for of, count in zip(chances, counts, strict=True)])
        self.worth.add(tokens * times.plain / num_seqs / (times.verify[sum(counts)] + proposal))
        return counts

    @override
    def forget(self, sequence: Hashable) -> None:
        super().forget(sequence)
        self._unseen.pop(sequence, None)

    def _lookup_rule(self, candidates: Sequence[Candidate]) -> StopRule | None:
        """It keeps about those that were selected lately."""
        if not self.by_evidence:
            return None
        requests, num_seqs = [self.request(c.sequence) for c in candidates if c.most], len(candidates)
        num_drafts = round(self.selecting.num_drafts * num_seqs)
        further = 1 + num_drafts // 2
        times = self._times.of(num_seqs, num_drafts + further)
        row_seconds = (times.verify[num_drafts + further] - times.verify[num_drafts]) / further
        rate = self.selecting.speed * num_seqs / times.plain
        return StopRule.of(self.acceptance, requests, rate * row_seconds, 0.0)
