"""Trials of other steps than those that pay, to find out what they take: where drafting is believed to gain little."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specpaged.speculation.pass_errors import PassErrors

TRIAL_STEPS = 4
_DOUBTS = 2.0  # standard deviations: who gains more by drafting need not ask what other steps take
_DOUBT = 0.03  # at least, in the logarithm of speed
_FIRST, _LATER = 16, 256  # steps that draft between two of them; twice as many after each


class Trials:
    """Says when one is due, and of what.

    Who drafts in every step sees one kind of pass, and cannot tell an error of what it takes from a slow machine.
    """

    def __init__(self, errors: PassErrors):
        self.errors = errors
        self._num_untried, self._every = 0, _FIRST
        self._halves = False  # whether the last one was of fewer drafts, not of none

    def next(self, counts: Sequence[int], speed: float, num_steps: int) -> list[int] | None:
        """The drafts of one that is due; by turns none, and about half of these. None as long as there is none.

        So many steps with such drafts there were since last, so many times as fast as plain ones, as is believed.
        """
        self._num_untried += num_steps
        if self._num_untried < self._every:
            return None
        doubt = self.errors.doubt(len(counts), len(counts) + sum(counts))
        self._num_untried = 0
        if math.log(speed) >= _DOUBTS * max(_DOUBT, doubt):
            return None
        self._every = min(_LATER, 2 * self._every)
        self._halves = not self._halves and max(counts) > 1
        return [(count + 1) // 2 if self._halves else 0 for count in counts]
