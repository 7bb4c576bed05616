"""What decides how much to draft for whom, and what of it to verify."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from specpaged.speculation.cost_model import PassShape
from specpaged.speculation.stop_rule import StopRule


@dataclass(slots=True)
class Candidate:
    """A sequence that goes on, when its next drafts are planned."""

    sequence: Hashable
    most: int  # drafts that it may have
    lag: int = 1  # known tokens that the drafter has not run
    context_len: int = 0  # known tokens


@dataclass(slots=True)
class Plan:
    """What the drafter is to do: so many drafts of each candidate, and whose tokens it looks back at.

    Looking back, it runs what it has not seen of a sequence, and says what it would have drafted there: for the price
    of a pass, as many outcomes as there are tokens.
    """

    num_draft_tokens: list[int]
    looks_back: Sequence[int] = ()  # indices of candidates
    stop_rule: StopRule | None = None  # its rows are the candidates with drafts, in order


class Controller(Protocol):
    """Decides about drafts, and learns how they fare. Whatever it decides, outputs are the same."""

    def plan(self, candidates: Sequence[Candidate]) -> Plan:
        """How deep to draft for each candidate, before anything is drafted: at most `most`."""
        ...

    def select(self, candidates: Sequence[Candidate], evidence: Sequence[Sequence[float]]) -> list[int]:
        """How many of each candidate's drafts to verify, by the evidence of each: at most all of them."""
        ...

    def observe_drafts(
        self, sequence: Hashable, outcomes: Sequence[bool], evidence: Sequence[float] | None = None
    ) -> None:
        """Drafts of a sequence, first to last, have stood or fallen; none behind one that fell."""
        ...

    def observe_target(self, shape: PassShape, seconds: float) -> None:
        """A target pass has taken so long."""
        ...

    def observe_proposal(self, passes: Sequence[PassShape], seconds: float) -> None:
        """A proposal of such passes has taken so long."""
        ...

    def observe_rest(self, seconds: float) -> None:
        """A step has taken so long beside its passes."""
        ...

    def forget(self, sequence: Hashable) -> None:
        """The sequence has ended."""
        ...
