"""A plan of drafts as it stands: whom it is for, how old it is, and for how long it is followed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

from specpaged.engine.candidate import Arrival, draft_lag, num_left
from specpaged.engine.sequence import Sequence
from specpaged.speculation.controller import Plan
from specpaged.speculation.lookup_choice import LookupChoice

# Plans that are provisional, where a text has turned; where that is fewer than one of so many, one: what is provisional
# takes a host longer in every step, and the better drafts of one among many are worth less. Nor is a plan made for who
# comes, as long as those are as few.
_UNSETTLED, _OF_FEW = 3, 4
_OF_MANY = 8  # sequences, one of which is to have turned for a plan to end: one of more is few, or chance
_MOST_HEIRS = 15  # that follow, one after another, what was planned for another one


@dataclass(slots=True)
class StandingPlan:
    """What a controller has planned for some sequences, until they change or it is old. Of nobody, to begin with.

    Of one that has come alone it is left, when that has ended, to the next ones that come alone and like it: to plan
    takes longer than a step, and of neither is anything known.
    """

    sequences: list[Sequence] = field(default_factory=list)
    plan: Plan = field(default_factory=lambda: Plan([]))
    age: int = 0  # steps since it was made
    good_for: int = 0  # steps that it is followed for
    arrival: Arrival | None = None  # of whom it was made for
    decided_before: SequenceOf[int] = ()  # drafts of those whom the plan before was for
    again: Plan = field(init=False)  # in the steps behind its first one, which alone looks back
    lasts: int = field(init=False)  # steps, for each of those whom it is left to
    num_heirs: int = 0
    since: int = 0  # its age when it was left to the last of them
    left: Plan | None = None
    looks_every: float = math.inf  # steps, from one time to the next that it is asked whom to look back at
    looked: int = 0  # its age when that was asked
    num_turned: int = 0  # texts of its sequences, since it was made
    num_come: int = 0  # sequences that it was not made for, and holds for
    num_unsettled: int = 0  # plans behind it that are to be provisional, as a text has turned

    def __post_init__(self) -> None:
        self.again = replace(self.plan, looks_back=(), glances=())
        self.lasts = self.good_for - self.age

    @property
    def drafts(self) -> bool:
        """Whether there is anything to draft in it."""
        return any(self.plan.num_draft_tokens) or any(self.plan.lookups)

    @property
    def decided(self) -> SequenceOf[int]:
        """The drafts of each, by the last plan that was no trial."""
        return self.decided_before if self.plan.is_trial else self.plan.num_draft_tokens

    @property
    def num_left(self) -> int:
        """Steps that it will still be followed for."""
        return self.good_for - self.age

    @property
    def looks_in(self) -> float:
        """Steps, behind which it is to be asked whom to look back at."""
        return self.looked + self.looks_every - self.age

    def holds_for(self, sequences: SequenceOf[Sequence]) -> bool:
        """Whether it is to be followed by these, and from now on is one for them."""
        return self.age < self.good_for and (sequences == self.sequences or self._goes_on_with(sequences))

    def forget(self, sequence: Sequence) -> None:
        """It holds for the others at the most."""
        if sequence in self.sequences:
            others = [other for other in self.sequences if other is not sequence]
            if not (others and self._goes_on_with(others)):
                if self.arrival is not None and self.num_heirs < _MOST_HEIRS:
                    self.left = self.again
                self.sequences, self.plan, self.again, self.num_unsettled = [], Plan([]), Plan([]), 0

    def ends_with_turn(self) -> None:
        """A text of its sequences has turned: if that is a part of them, the next plans are to find out how."""
        self.num_turned += 1
        if _OF_MANY * self.num_turned < len(self.sequences):
            return
        num_unsettled = _UNSETTLED if _OF_FEW * self.num_turned >= len(self.sequences) else 1
        self.good_for, self.num_unsettled = self.age, max(self.num_unsettled, num_unsettled)

    def still_unsettled(self, sequences: SequenceOf[Sequence], plan: Plan) -> int:
        """Of the plans that are to be provisional, how many are left with this new one: none, if those whom this was
        for are to draft as much as before. If a text has turned, it is no matter. A trial says nothing.
        """
        is_settled = (
            not plan.is_trial
            and sequences == self.sequences
            and any(plan.num_draft_tokens)
            and list(plan.num_draft_tokens) == list(self.decided)
        )
        return 0 if is_settled else self.num_unsettled

    def is_left_to(self, sequence: Sequence, arrival: Arrival) -> bool:
        """Whether who has come so, alone, is to follow what it followed who is gone; from now on it is one for it."""
        if self.left is None or arrival.kind != self.arrival.kind or not arrival.would_be_planned(self.left):
            return False
        self.plan = self.again = self.left
        self.sequences, self.left, self.since = [sequence], None, self.age
        self.num_heirs += 1
        self.good_for = self.age + self.lasts
        return True

    def _most_drafts(self, sequence: Sequence) -> int:
        """That one may have who comes: none, if it is not repaid to catch up for them."""
        lag_repaid = self.plan.lag_repaid
        catches_up = lag_repaid is None or lag_repaid.repays(draft_lag(sequence), num_left(sequence))
        return sequence.max_model_draft_tokens if catches_up else 0

    def _takes_along(self, num_new: int, num_seqs: int) -> bool:
        """Whether so many more, of so many, may do as the others: nobody has been asked about them."""
        plan, num_come = self.plan, self.num_come + num_new
        are_few = plan.takes_newcomers or _OF_FEW * num_come < num_seqs
        if plan.is_trial or plan.is_provisional or plan.lookups or not are_few:
            return False
        self.num_come = num_come
        return True

    def _goes_on_with(self, sequences: SequenceOf[Sequence]) -> bool:
        """Whether it holds for these as well, and is now one for them: who stays keeps the drafts, if any.

        Who comes, while others draft, might as well: a few of many do as most of those, until there are more of them,
        or as many as may come where requests are alike.
        """
        plan, drafts = self.plan, self.drafts
        counts = dict(zip(self.sequences, plan.num_draft_tokens, strict=True))
        new = [sequence for sequence in sequences if sequence not in counts]
        if 2 * len(new) > len(sequences):
            return False
        if new and drafts and not self._takes_along(len(new), len(sequences)):
            return False
        if new:
            self.arrival = None  # it is nobody's alone any more
        if not (drafts or plan.is_trial):  # as mostly where drafting does not pay: a copy of all fields takes longer
            self.sequences, self.plan = list(sequences), Plan([0] * len(sequences), num_steps=plan.num_steps)
            self.again = self.plan
            return True
        models, most = list(sequences), {}  # of each, whose drafts it has: its own, or of who comes the middle one's
        if new:
            usual = sorted(self.sequences, key=counts.__getitem__)[len(self.sequences) // 2]
            most = {sequence: self._most_drafts(sequence) for sequence in new}
            models = [usual if sequence in most else sequence for sequence in sequences]
        planned = [counts[model] for model in models]
        kept = without_rule = _at_most(planned, sequences, most)
        stop_rule = plan.stop_rule
        if stop_rule is not None:
            row_of = {sequence: row for row, sequence in enumerate(filter(counts.get, self.sequences))}
            stop_rule = stop_rule.of_rows([row_of[model] for model, count in zip(models, kept, strict=True) if count])
            counts = dict(zip(self.sequences, plan.without_rule, strict=True))
            without_rule = _at_most([counts[model] for model in models], sequences, most)
        lookups: SequenceOf[LookupChoice | None] = ()
        if plan.lookups:
            choices = dict(zip(self.sequences, plan.lookups, strict=True))
            lookups = [choices.get(sequence) for sequence in sequences]
        self.sequences = list(sequences)
        self.plan = self.again = replace(
            plan,
            num_draft_tokens=kept,
            looks_back=(),
            glances=(),
            stop_rule=stop_rule,
            without_rule=without_rule,
            lookups=lookups,
        )
        return True


def _at_most(counts: SequenceOf[int], sequences: SequenceOf[Sequence], most: Mapping[Sequence, int]) -> list[int]:
    """The drafts of each, of whom some may have so many."""
    return [min(count, most.get(sequence, count)) for count, sequence in zip(counts, sequences, strict=True)]
