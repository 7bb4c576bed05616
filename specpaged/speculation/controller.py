"""What decides how much to draft for whom, and what of it to verify."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from typing_extensions import override

from specpaged.speculation.cost_model import CostModel
from specpaged.speculation.lookup_choice import LookupChoice
from specpaged.speculation.pass_seconds import PassShape
from specpaged.speculation.repaid_lag import RepaidLag
from specpaged.speculation.stop_rule import StopRule

GLANCE = 16  # tokens


@dataclass(slots=True)
class Candidate:
    """A sequence that goes on, when its next drafts are planned."""

    sequence: Hashable
    most: int  # drafts that it may have
    lag: int = 1  # known tokens that the drafter has not run
    num_unseen: int = 0  # of them, those that it can look back at: not the prompt's, nor the newest one
    context_len: int = 0  # known tokens
    num_left: int | None = None  # tokens that may still come, where that is known
    may_glance: bool = False  # whether the drafter can look at its last GLANCE tokens as if they were all
    model_drafts: bool = True  # of drafters together, whether that with a model may, too


@dataclass(slots=True)
class Plan:
    """What the drafter is to do: so many drafts of each candidate, and whose tokens it looks back at.

    Looking back, it runs what it has not seen of a sequence, and says what it would have drafted there: for the price
    of a pass, as many outcomes as there are tokens. Who is too far behind for that may be glanced at: the last GLANCE
    tokens alone are run, and the drafter says what it would have drafted behind the later half of them.
    """

    num_draft_tokens: list[int]
    looks_back: Sequence[int] = ()  # indices of candidates
    # Its rows are the candidates with drafts, in order. It selects, too, from drafts made in a call of several rounds.
    stop_rule: StopRule | None = None
    without_rule: Sequence[int] = ()  # the drafts of each candidate where nobody asks the rule
    num_steps: int = 1  # that it is good for, as long as the candidates are the same; but for its looks
    is_trial: bool = False  # what its steps take is to be told, but for the first one's that finds other caches
    is_provisional: bool = False  # what its first steps show is worth a plan of its own, whatever that takes
    tries_rows: bool = False  # it is a trial of the target's passes alone: any tokens will do as drafts
    # Of each candidate, when it takes what a lookup beside the model finds, in place of those drafts; none: never.
    lookups: Sequence[LookupChoice | None] = ()
    glances: Sequence[int] = ()  # of those it looks back at, whose last GLANCE tokens are all that the drafter reads
    # What a drafter may have to catch up with: of who lags by more, there are no drafts. None: that is no reason.
    lag_repaid: RepaidLag | None = None
    takes_newcomers: bool = False  # who comes may have as many drafts as the others: requests are alike


class Controller(Protocol):
    """Decides about drafts, and learns how they fare. Whatever it decides, outputs are the same."""

    selects_by_rule = False  # whether what its plans' rules keep is what it would select itself
    looks_in = 32  # steps, behind which to ask whom to look back at, while a plan without drafts stands

    def plan(self, candidates: Sequence[Candidate], num_steps: int) -> Plan:
        """How deep to draft for each candidate, before anything is drafted: at most `most`. So many steps have come
        since it was asked last.
        """
        ...

    def look(self, candidates: Sequence[Candidate], num_steps: int) -> tuple[Sequence[int], Sequence[int]]:
        """Whom to look back at while a plan without drafts stands, so many steps after that, or this, was asked last:
        indices of candidates, and those of them that are glanced at.
        """
        return (), ()

    def selects(self) -> bool:
        """Whether drafts that have just been made are to be selected from; if not, all of them are verified."""
        return True

    def select(self, sequences: Sequence[Hashable], evidence: Sequence[Sequence[float]]) -> list[int]:
        """How many drafts of each sequence to verify, by the evidence of each: at most all of them.

        The sequences are those of the last plan, though perhaps some steps later. Who has taken a lookup's draft, by
        the plan's choice, comes without any: that is cut already.
        """
        ...

    def observe_drafts(
        self, sequence: Hashable, num_accepted: int, num_rejected: int, evidence: Sequence[float] | None = None
    ) -> None:
        """The first drafts of a sequence stood, and the next one fell, or nothing is known of it (0)."""
        ...

    def observe_outcomes(self, sequence: Hashable, num_accepted: int, num_rejected: int) -> None:
        """So many drafts of a sequence stood, or would have, and so many fell, of one proposal or of several: what it
        has looked back at, or drafted since its text has turned. Who does not say how hears of as many single drafts.
        """
        for stood in [1] * num_accepted + [0] * num_rejected:
            self.observe_drafts(sequence, stood, 1 - stood)

    def expects(self, sequence: Hashable) -> float | None:
        """The probability that a draft of the sequence stands, by all that has been told; None if that is not said."""
        return None

    def observe_lookup(
        self, lookup: int, sequence: Hashable, num_accepted: int, num_rejected: int, evidence: Sequence[float]
    ) -> None:
        """The same of what a lookup, the first one being 0, has found beside a model, whether or not it was taken."""
        ...

    def observe_target(self, shape: PassShape, seconds: float) -> None:
        """A target pass has taken so long."""
        ...

    def observe_proposal(
        self, passes: Sequence[PassShape], seconds: float, num_seqs: int, rest_seconds: float, num_rounds: int = 1
    ) -> None:
        """A proposal of such passes has taken so long, and so long the rest of a step of so many sequences; 0, if that
        is not known.
        """
        ...

    def observe_drafting(self, passes: Sequence[PassShape], seconds: float) -> None:
        """Such passes, which made drafts within a call of several rounds, have taken so long."""
        ...

    def observe_rest(self, seconds: float, num_seqs: int, num_rounds: int = 1) -> None:
        """A step without drafts has taken so long beside its passes."""
        ...

    def observe_end(self, num_tokens: int, most_tokens: int) -> None:
        """A sequence has ended with so many tokens of output, of those that it might have had."""
        ...

    def forget(self, sequence: Hashable) -> None:
        """The sequence has ended, or given up its KV."""
        ...


class MeasuringController(Controller):
    """Refines `costs` by what passes take."""

    costs: CostModel

    @override
    def observe_target(self, shape: PassShape, seconds: float) -> None:
        self.costs.observe_target(shape, seconds)

    @override
    def observe_proposal(
        self, passes: Sequence[PassShape], seconds: float, num_seqs: int, rest_seconds: float, num_rounds: int = 1
    ) -> None:
        self.costs.observe_proposal(passes, seconds, num_seqs, rest_seconds, num_rounds)

    @override
    def observe_drafting(self, passes: Sequence[PassShape], seconds: float) -> None:
        self.costs.observe_drafting(passes, seconds)

    @override
    def observe_rest(self, seconds: float, num_seqs: int, num_rounds: int = 1) -> None:
        self.costs.observe_rest(seconds, num_seqs, num_rounds)
