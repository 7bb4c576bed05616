"""Whose drafts have come to fare otherwise than lately: counted in every round, which takes next to nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specpaged.engine.sequence import Sequence
from specpaged.speculation.acceptance import contradicts

_ENOUGH = 6  # drafts with an outcome that are judged together
_REMEMBERED = 24  # of those before
_WORSE = 2.0  # standard deviations, of a text of which little is known
Expects = Callable[[Sequence], "float | None"]  # the probability that a draft stands, if anybody says


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

    def add(
        self, sequence: Sequence, num_accepted: int, num_rejected: int, expects: Expects | None = None
    ) -> tuple[int, int] | None:
        """So many drafts stood and so many fell. If the text has turned by that, how many did since it may have; of a
        new one that is worse than `expects` says, all of them.
        """
        fared = self._of.get(sequence)
        if fared is None:
            fared = self._of[sequence] = _Fared()
        num_new, num_stood = fared.new
        fared.new = num_new + num_accepted + num_rejected, num_stood + num_accepted
        if fared.new[0] < _ENOUGH:
            return None
        if expects is None or fared.before[0] >= _ENOUGH:
            return self._judge(fared)
        seen, stood = _sum(fared.before, _sum(fared.last, fared.new))
        turned = self._judge(fared)
        if turned is None and _is_worse(seen, stood, expects(sequence)):
            fared.before = (0, 0)
            return round(stood), round(seen - stood)
        return turned

    def _judge(self, fared: _Fared) -> tuple[int, int] | None:
        new, last, before = fared.new, fared.last, fared.before
        so_far, newest = _sum(before, last), _sum(last, new)
        fared.new, fared.last = (0, 0), new
        for (num, num_stood), (num_before, num_stood_before) in ((new, so_far), (newest, before)):
            if num_before < _ENOUGH:
                break
            if contradicts(num_stood, num, (num_stood_before + 1) / (num_before + 2)):
                fared.before = (0, 0)
                return num_stood, num - num_stood
        num_seen, num_accepted = so_far
        kept = min(1.0, _REMEMBERED / max(1, num_seen))
        fared.before = kept * num_seen, kept * num_accepted
        return None

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._of.pop(sequence, None)


def _is_worse(num_seen: float, num_stood: float, expected: float | None) -> bool:
    """Drafts that are verified may be better ones than others, but no worse."""
    worse = expected is not None and num_stood < num_seen * expected
    return worse and contradicts(num_stood, num_seen, expected, _WORSE)


def _sum(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    return a[0] + b[0], a[1] + b[1]
