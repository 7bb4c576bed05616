"""Whether steps of half a batch, with drafting hidden behind verification, are quicker than steps of all of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from specpaged.speculation.cost_model import CostModel
from specpaged.speculation.octave import octave_of
from specpaged.speculation.step_times import StepTimes

_SHARE = 0.01  # of the time: what trials may lose, in all
_TRIAL, _ENOUGH = 12, 5  # steps heard of a trial, at most; and of the usual kind, to know what that takes
_GAIN = 0.02  # by which halves have to be quicker, to begin with them
_LOSS = 0.25  # of a trial's time: what is saved up for it, at the least
_MOST_PATIENCE = 32  # times as much is saved up for a trial, where many before it have changed nothing


class Stint(NamedTuple):
    """What a step of one kind took, none of whose sequences was in its prompt."""

    by_halves: bool
    num_rounds: int  # of its sequences, all together
    seconds: float
    verify_seconds: float = 0.0
    draft_seconds: float = 0.0


class OverlapChoice:
    """Goes by halves where that has been quicker, round by round of a sequence; by octaves of the batch size.

    Steps of all sequences come first. What they take is saved up, a hundredth of it, until it pays for a trial of the
    other kind, which ends as soon as so much has been lost; what it has lost beyond that is saved up before the next
    one. `expect` says how long steps by halves take at the least, over others, None where nobody knows:
    then a round takes the longer of verification and drafting, in place of both. Where that promises nothing, nothing
    is tried. What a trial shows beyond it (lanes that share cores, or memory) is expected elsewhere, too.
    """

    def __init__(self, expect: Callable[[int], float | None]):
        self._expect = expect
        self._of: dict[int, _Known] = {}  # by octave of the batch size
        self._octave = 0  # of the last step
        self._is_trying = False
        self._num_left = 0  # steps of the trial
        self._slower = 1.0  # what steps by halves took, over what was expected, in the last trial

    def by_halves(self, num_seqs: int) -> bool:
        """Whether the next step of so many sequences is to be of half of them."""
        octave = octave_of(num_seqs)
        if octave != self._octave:  # a trial of another batch size shows nothing of this one
            self._octave, self._is_trying = octave, False
        return self._known().by_halves != self._is_trying

    def heard(self, num_seqs: int, stint: Stint) -> None:
        """A step of a batch of so many sequences, or of half of it."""
        known, seconds = self._known(), stint.seconds / stint.num_rounds
        if octave_of(num_seqs) != self._octave or stint.by_halves != (known.by_halves != self._is_trying):
            return
        known.seconds[stint.by_halves].append(seconds)
        if not stint.by_halves and not self._is_trying:
            longer = max(stint.verify_seconds, stint.draft_seconds)
            known.bounds.append(1.0 - (stint.verify_seconds + stint.draft_seconds - longer) / stint.seconds)
        if self._is_trying:
            known.saved -= (seconds - median(known.seconds[known.by_halves])) * stint.num_rounds
            self._num_left -= 1
            if self._num_left <= 0 or (known.saved < 0 and len(known.seconds[stint.by_halves]) > 1):
                self._judge(num_seqs, known)
            return
        known.saved += _SHARE * stint.seconds
        if len(known.seconds[known.by_halves]) >= _ENOUGH and known.saved >= self._price(known, stint):
            self._try_other(num_seqs, known)

    def _known(self) -> _Known:
        known = self._of.get(self._octave)
        if known is None:
            known = self._of[self._octave] = _Known()
        return known

    def _price(self, known: _Known, stint: Stint) -> float:
        """Seconds that have to be saved up for a trial."""
        expected = known.ratio if known.ratio is not None else self._slower
        over_usual = 1.0 / expected if known.by_halves else expected
        return known.patience * _TRIAL * stint.seconds * max(_LOSS, over_usual - 1.0)

    def _try_other(self, num_seqs: int, known: _Known) -> None:
        if not known.by_halves and self._slower * self._expected(num_seqs, known) > 1.0 - _GAIN:
            known.saved = 0.0  # and ask again when as much has been saved
            self._slower = min(self._slower, 1.0 + 0.9 * (self._slower - 1.0))  # machines change
            return
        self._is_trying, self._num_left = True, _TRIAL
        known.seconds[not known.by_halves].clear()

    def _judge(self, num_seqs: int, known: _Known) -> None:
        self._is_trying, was = False, known.by_halves
        known.ratio = median(known.seconds[True]) / median(known.seconds[False])
        if not was:
            self._slower = known.ratio / self._expected(num_seqs, known)
        known.by_halves = known.ratio < (1.0 if was else 1.0 - _GAIN)
        known.patience = 1 if known.by_halves != was else min(_MOST_PATIENCE, 2 * known.patience)

    def _expected(self, num_seqs: int, known: _Known) -> float:
        expected = self._expect(num_seqs)
        return median(known.bounds) if expected is None else expected


class _Known:
    """Of one octave of batch sizes."""

    def __init__(self) -> None:
        self.by_halves = False
        self.ratio: float | None = None  # of a round's time by halves over that of others
        self.seconds: dict[bool, deque[float]] = {kind: deque(maxlen=_TRIAL) for kind in (False, True)}  # by halves?
        self.bounds: deque[float] = deque(maxlen=_TRIAL)  # the same, were drafting or verification nothing
        self.saved = 0.0  # seconds, to be lost by trying
        self.patience = 1


def expected_ratio(costs: CostModel, num_seqs: int, num_drafts: int, context: float) -> float:
    """How long a round by halves takes, over one of all, if no lane slows down the other.

    Each of `num_seqs` sequences of `context` tokens has so many drafts. With V(n) and D(n) of n sequences, and what a
    step takes besides in V: 2 max(V(n / 2), D(n / 2)) / (V(n) + D(n)). Of two equal parts that are bound by arithmetic
    that is max(V, D) / (V + D), MineDraft's model; where reading weights binds, halves take as long as the whole, and
    nothing is hidden that is not read twice.
    """

    def verify_and_draft(size: int) -> tuple[float, float]:
        times = StepTimes.of(costs, size, size * num_drafts, context)
        return times.verify[size * num_drafts], times.drafting([num_drafts] * size) + costs.proposal_of_round(size)

    halves = [verify_and_draft(size) for size in (num_seqs // 2, num_seqs - num_seqs // 2) if size]
    return sum(map(max, halves)) / sum(verify_and_draft(num_seqs))
