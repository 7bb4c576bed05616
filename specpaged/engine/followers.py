"""Who is worth following, of a drafter that runs whatever the target runs, or loses the sequence. No torch."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

from specpaged.engine.sequence import Sequence

if TYPE_CHECKING:
    from specpaged.engine.draft_planner import DraftPlanner

_IDLE = 48  # steps without a draft planned, behind which a sequence is followed no more
_FRUITLESS, _ONE_OF = 2, 12  # sequences in a row that had none at all; from then on one of so many is followed


class Followers:
    """Hidden states do not come again: who is not followed drafts no more, and costs what plain decoding does.

    A sequence whose plans have been without drafts for long is given up. Where several in a row never had any, up to
    then or to their end, of new ones most are not followed from the start: following costs as much as a drafter's first
    pass does, for each token. Any plan with drafts makes all new ones welcome again.
    """

    def __init__(self) -> None:
        self._idle: dict[Sequence, int] = {}  # steps since drafts were planned, of who is followed
        self._have_drafted: set[Sequence] = set()
        self._num_fruitless = 0
        self._num_refused = 0  # since one was followed for a trial

    def admits(self) -> bool:
        """Whether a new sequence is to be followed."""
        if self._num_fruitless < _FRUITLESS:
            return True
        self._num_refused = (self._num_refused + 1) % _ONE_OF
        return self._num_refused == 0

    def planned(self, sequences: SequenceOf[Sequence], counts: SequenceOf[int], num_steps: int) -> None:
        """So many drafts are planned for each, behind so many steps."""
        for sequence, count in zip(sequences, counts, strict=True):
            if count:
                self._idle[sequence] = self._num_fruitless = 0
                self._have_drafted.add(sequence)
            elif sequence.max_draft_tokens:
                idle = self._idle.get(sequence)  # not of a newcomer, in whose time these steps were not
                self._idle[sequence] = idle = 0 if idle is None else idle + num_steps
                if idle > _IDLE:
                    sequence.max_draft_tokens = 0
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
    """Whether a new sequence is to draft at all."""
    return planner is None or planner.followers is None or planner.followers.admits()
