"""Decoding with all drafts that may be, to see how they fare."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf

from typing_extensions import override

from specpaged.comparison.round_timer import MOST_DEPTH
from specpaged.drafting.base import Drafter
from specpaged.drafting.combined import CombinedDrafter
from specpaged.drafting.draft import Draft
from specpaged.engine.draft_planner import DraftPlanner
from specpaged.engine.outcomes import outcome_of
from specpaged.engine.sequence import Sequence
from specpaged.speculation.controller import Candidate, MeasuringController, Plan
from specpaged.speculation.cost_model import CostModel
from specpaged.speculation.lookup_choice import LookupChoice
from specpaged.speculation.stop_rule import StopRule


class ProfilingController(MeasuringController):
    """Drafts as much as it may, whatever comes of it, and keeps what does.

    Of several drafters together each sequence takes what it takes where K is fixed.
    """

    def __init__(self, costs: CostModel, drafter: Drafter | None = None):
        self.costs = costs
        self.num_trials: dict[Hashable, list[int]] = {}  # by request id: drafts at each place, with all before them
        self.num_accepted: dict[Hashable, list[int]] = {}  # standing; and those of them that stood as well
        self.num_asked = 0  # sequences that went on from a step, each time
        self.num_drafted = 0  # of these, the ones that got a draft
        self._combined = drafter if isinstance(drafter, CombinedDrafter) else None

    @override
    def plan(self, candidates: SequenceOf[Candidate], num_steps: int = 1) -> Plan:
        most = [min(c.most, MOST_DEPTH) for c in candidates]
        if self._combined is None:
            return Plan(most)
        of_model = [0] * len(most) if self._combined.model is None else most
        lookups: list[LookupChoice | None] = list(map(self._combined.choice, most, of_model))
        return Plan(of_model, lookups=lookups)

    @override
    def select(self, sequences: SequenceOf[Hashable], evidence: SequenceOf[SequenceOf[float]]) -> list[int]:
        return list(map(len, evidence))

    @override
    def observe_drafts(
        self,
        sequence: Hashable,
        num_accepted: int,
        num_rejected: int,
        evidence: SequenceOf[float] | None = None,
    ) -> None:
        request_id = getattr(sequence, "request_id", sequence)
        for counts, num in (
            (self.num_trials.setdefault(request_id, [0] * MOST_DEPTH), num_accepted + num_rejected),
            (self.num_accepted.setdefault(request_id, [0] * MOST_DEPTH), num_accepted),
        ):
            for j in range(num):
                counts[j] += 1


class ProfilingPlanner(DraftPlanner):
    """Tells a ProfilingController of every draft that is verified, whoever has made it, step by step."""

    controller: ProfilingController

    @override
    def plan(self, sequences: SequenceOf[Sequence], num_rounds: int = 1) -> Plan:
        self.controller.num_asked += len(sequences)
        return super().plan(sequences, num_rounds)

    @override
    def rounds(self, sequences: SequenceOf[Sequence]) -> tuple[int, list[int], StopRule | None, bool]:
        return 1, [], None, False

    @override
    def select(self, sequences: SequenceOf[Sequence], drafts: SequenceOf[Draft]) -> list[Draft]:
        self.controller.num_drafted += sum(map(bool, drafts))
        return super().select(sequences, drafts)

    @override
    def told(self, sequence: Sequence, draft: Draft, token_ids: SequenceOf[int]) -> None:
        if draft:
            self.controller.observe_drafts(sequence, *outcome_of(draft, token_ids))
