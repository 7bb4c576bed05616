"""Who is worth following, of a drafter that runs whatever the target runs, or loses the sequence. No torch."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

from specpaged.engine.sequence import Sequence

if TYPE_CHECKING:
    from specpaged.engine.draft_planner import DraftPlanner

_IDLE = 48  # steps without a draft planned, behind which a sequence is followed no more
# Sequences in a row that had none at all; from then on one of so many is followed, and of as many more for each of
# these that has none either, up to the most.
_FRUITLESS, _ONE_OF, _ONE_OF_MOST = 2, 12, 96


def give_up(sequence: Sequence, keeps_lookups: bool) -> None:
    """The model of a drafter drafts no more for it; lookups that draft together with that do."""
    sequence.model_drafts = False
    if not keeps_lookups:
        sequence.max_draft_tokens = 0


class Followers:
    """Hidden states do not come again: who is not followed drafts no more, and costs what plain decoding does. Where
    lookups draft together with heads, it keeps theirs.

    A sequence whose plans have been without drafts for long is given up. Where several in a row never had any, up to
    then or to their end, of new ones most are not followed from the start: following costs as much as a drafter's first
    pass does, for each token. Any plan with drafts makes all new ones welcome again.
    """

    def __init__(self, keeps_lookups: bool = False) -> None:
        self.keeps_lookups = keeps_lookups
        self._idle: dict[Sequence, int] = {}  # steps since drafts were planned, of who is followed
        self._have_drafted: set[Sequence] = set()
        self._num_fruitless = 0
        self._num_refused = 0  # since one was followed for a trial

    def admits(self) -> bool:
        """Whether a new sequence is to be followed."""
        if self._num_fruitless < _FRUITLESS:
            return True
        one_of = min(_ONE_OF_MOST, _ONE_OF * (1 + self._num_fruitless - _FRUITLESS))
        self._num_refused = (self._num_refused + 1) % one_of
        return self._num_refused == 0

    def planned(self, sequences: SequenceOf[Sequence], counts: SequenceOf[int], num_steps: int) -> None:
        """So many drafts are planned for each, behind so many steps."""
        for sequence, count in zip(sequences, counts, strict=True):
            if count:
                self._idle[sequence] = self._num_fruitless = 0
                self._have_drafted.add(sequence)
            elif sequence.max_model_draft_tokens:
                idle = self._idle.get(sequence)  # not of a newcomer, in whose time these steps were not
                self._idle[sequence] = idle = 0 if idle is None else idle + num_steps
                if idle > _IDLE:
                    give_up(sequence, self.keeps_lookups)
                    self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """It has ended, or given up its KV, or is followed no more."""
        if self._idle.pop(sequence, None) is not None:
            self._num_fruitless += sequence not in self._have_drafted
        self._have_drafted.discard(sequence)

    @property
    def num_followed(self) -> int:
        """Sequences that are remembered."""
        return len(self._idle)


def admits(planner: DraftPlanner | None) -> bool:
    """Whether a new sequence is to be followed, of a drafter that follows."""
    return planner is None or planner.followers is None or planner.followers.admits()


def keeps_lookups(planner: DraftPlanner | None) -> bool:
    """Whether who is not followed has lookups' drafts."""
    return planner is not None and planner.followers is not None and planner.followers.keeps_lookups
