"""How far what was seen lies from what was expected: most of the last times."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

NUM_RECENT = 31  # passes whose median says what all have in common
FEWEST = NUM_RECENT // 2  # of one kind, that something is known by
FEW = 5  # that tell more of their kind than those of another one do
_NUM_NEWEST = 5  # of them, whose median says how busy the machine is at this moment
_MEDIAN_EVERY = 8  # passes
_SHIFT = 0.05  # in the logarithm: a median beyond it is no noise


class Surprises:
    """The logarithms of seen / expected of the last passes of one kind, and their median, as it was some passes ago."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=NUM_RECENT)
        self._num_seen = 0
        self.median = 0.0

    def add(self, surprise: float) -> None:
        """Of another one."""
        self._last.append(surprise)
        self._num_seen += 1
        if self._num_seen % _MEDIAN_EVERY == FEWEST % _MEDIAN_EVERY:
            self.median = median(self._last)

    @property
    def newest(self) -> float:
        """The median of the last few."""
        return median(list(self._last)[-_NUM_NEWEST:]) if self._last else 0.0

    def take_shift(self, fewest: int = FEWEST) -> float:
        """The factor that most of the last passes show, which is expected from now on; 1 as long as there is none, or
        there were not `fewest`. Of fewer than are wanted otherwise, the newest ones show it.
        """
        if self._num_seen < fewest:
            return 1.0
        shown = self.median if self._num_seen >= FEWEST else self.newest
        if abs(shown) < _SHIFT:
            return 1.0
        self._last.clear()
        self._num_seen, self.median = 0, 0.0
        return math.exp(shown)
