"""Whose drafts have come to fare otherwise than lately: counted in every round, which takes next to nothing."""

from __future__ import annotations

from dataclasses import dataclass

from specpaged.engine.sequence import Sequence
from specpaged.speculation.acceptance import contradicts

_ENOUGH = 6  # drafts with an outcome that are judged together
_REMEMBERED = 24  # of those before


@dataclass(slots=True)
class _Fared:
    """Drafts of a sequence with an outcome, and how many of them stood: in the newest ones, those judged last, and
    before.
    """

    new: tuple[float, float] = (0, 0)
    last: tuple[float, float] = (0, 0)
    before: tuple[float, float] = (0, 0)


class Turns:
    """Counts what came of each sequence's drafts.

    What is known of them besides is looked at now and then, and plans go by that; a text that turns in between is not
    to be drafted for as it was until then. Some drafts are judged together, and once more with those before them, as
    the text may have turned among these.
    """

    def __init__(self) -> None:
        self._of: dict[Sequence, _Fared] = {}

    def add(self, sequence: Sequence, num_accepted: int, num_rejected: int) -> tuple[int, int] | None:
        """So many drafts stood and so many fell. If the text has turned by that, how many did since it may have."""
        fared = self._of.get(sequence)
        if fared is None:
            fared = self._of[sequence] = _Fared()
        fared.new = _sum(fared.new, (num_accepted + num_rejected, num_accepted))
        return self._judge(fared) if fared.new[0] >= _ENOUGH else None

    def _judge(self, fared: _Fared) -> tuple[int, int] | None:
        new, last, before = fared.new, fared.last, fared.before
        so_far = num_seen, num_accepted = _sum(before, last)
        fared.new, fared.last = (0, 0), new
        for (num, num_stood), (num_before, num_stood_before) in ((new, so_far), (_sum(last, new), before)):
            expected = (num_stood_before + 1) / (num_before + 2)
            if num_before >= _ENOUGH and contradicts(num_stood, num, expected):
                fared.before = (0, 0)
                return num_stood, num - num_stood
        kept = min(1.0, _REMEMBERED / max(1, num_seen))
        fared.before = kept * num_seen, kept * num_accepted
        return None

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._of.pop(sequence, None)


def _sum(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    return a[0] + b[0], a[1] + b[1]
