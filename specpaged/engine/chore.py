"""What is done now and then beside the steps, as often as a share of the time allows."""

from __future__ import annotations

import math

_RECENT, _STANDS_OUT = 0.2, 4.0  # of what it takes on average, the last time; and how many times that it may count for


class Chore:
    """How often to do it, by what it takes, so many seconds at the least: on a busy machine more, and with cold caches.

    From one time to the next there are `fewest` to `most` steps.
    """

    def __init__(self, seconds: float, share: float, fewest: int, most: int):
        self._least = self._seconds = seconds
        self._share = share
        self._fewest, self._most = fewest, most

    def took(self, seconds: float) -> None:
        """It has taken so long. A single time that stands out says little."""
        seconds = min(seconds, _STANDS_OUT * self._seconds)
        self._seconds = max(self._least, self._seconds + _RECENT * (seconds - self._seconds))

    def every(self, step_seconds: float) -> int:
        """Steps of that length from one time to the next, for it to take its share; the fewest where that is unknown
        (0).
        """
        steps = self._seconds / self._share / step_seconds if step_seconds else 0.0
        return max(self._fewest, min(self._most, math.ceil(steps)))
