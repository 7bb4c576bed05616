"""Selecting drafts by their evidence, as often as it brings more than it takes."""

from __future__ import annotations

from specpaged.speculation.selection import Chances, select
from specpaged.speculation.step_times import StepTimes

NOTHING = 0.02  # of a step: what this saves is not worth looking for
_SECONDS = 4e-5  # that it takes
_SELDOM = 8  # times it is asked, where selecting has gained less than it takes, or a rule does so
_RATE = 0.1  # of the averages, for the newest of what they are of
_MOST_GAIN = 0.1


class Selecting:
    """What it has brought lately: `gain`, of speed, by what was left out.

    `num_drafts` of a sequence were selected in the mean, and promised `speed`, over plain decoding's.
    """

    def __init__(self) -> None:
        self.gain = _MOST_GAIN
        self.num_drafts = 1.0
        self.speed = 1.0
        self.is_ruled = False  # drafts are those of one sequence, and a rule has stopped them where it would cut
        self._num_unasked = 0  # proposals since the last selection

    @property
    def pays(self) -> bool:
        """Whether it gains more than it takes."""
        return self.gain >= NOTHING

    def is_due(self) -> bool:
        """Whether drafts that have just been made are to be selected from."""
        self._num_unasked += 1
        return (self.pays and not self.is_ruled) or self._num_unasked >= _SELDOM

    def could_gain(self, times: StepTimes, num_drafts: int) -> bool:
        """Whether to leave any of so many drafts out could make a step shorter; if not, all are to be verified."""
        self._num_unasked = 0
        if times.verify[num_drafts] < (1.0 + NOTHING) * times.verify[0]:
            self.gain -= _RATE * self.gain
            return False
        return True

    def select(self, chances: Chances, times: StepTimes, proposal_seconds: float, num_rounds: int) -> list[int]:
        """How many drafts of each sequence to verify, which took so long to make, once for so many rounds."""
        # What the proposal has taken is part of the step: without it, rows would seem dearer than they are.
        counts, rate = select(chances, times.verify, proposal_seconds=proposal_seconds)
        seconds_of_all = times.verify[sum(map(len, chances))] + proposal_seconds
        rate_of_all = (len(chances) + sum(map(sum, chances))) / seconds_of_all
        gain = rate / rate_of_all - 1.0 - _SECONDS / (num_rounds * seconds_of_all)
        self.gain += _RATE * (min(_MOST_GAIN, gain) - self.gain)
        self.num_drafts += _RATE * (sum(counts) / len(counts) - self.num_drafts)
        self.speed += _RATE * (rate * times.plain / len(counts) - self.speed)
        return counts
