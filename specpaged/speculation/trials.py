"""Trials of other steps than those that pay, to find out what they take: where drafting is believed to gain little."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from specpaged.speculation.pass_errors import PassErrors

TRIAL_STEPS = 4
_DOUBTS = 2.0  # standard deviations: who gains more by drafting need not ask what other steps take
_DOUBT = 0.03  # at least, in the logarithm of speed
_FIRST, _LATER = 16, 256  # steps that draft between two of them; twice as many after each
_TRYING_ROWS = 0.001  # of the time, where nothing is drafted, beside what is in advance


class Trials:
    """Says when one is due, and of what.

    Who drafts in every step sees one kind of pass, and cannot tell an error of what it takes from a slow machine. Nor
    can who never drafts: there, rows are tried, of whatever tokens, as drafts of a model that has fallen behind would
    take far longer.
    """

    def __init__(self, errors: PassErrors):
        self.errors = errors
        self._num_untried, self._every = 0, _FIRST
        self._halves = False  # whether the last one was of fewer drafts, not of none
        self._credit = self._price = 0.0  # seconds for trials of rows, and what the next one takes
        self._seen: set[int] = set()  # octaves of batch sizes that there were
        self._tries_first = True  # what has never been tried is in advance

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

    def next_rows(
        self, num_seqs: int, seconds: float, hopeful: Callable[[float], Sequence[int]], price: Callable[[int], float]
    ) -> list[int] | None:
        """The rows of one that is due, as drafts of each sequence; None as long as there is none.

        The last steps took so many `seconds`. `hopeful` says what would be drafted if passes with drafts took less than
        is thought by a factor whose logarithm it is given: half of that is tried, but at least a row of each sequence,
        as less could not be told from none. `price` is what so many more rows take in a trial.
        """
        self._credit += _TRYING_ROWS * seconds
        octave = num_seqs.bit_length()
        if octave not in self._seen:  # there is nothing yet that could be compared
            self._seen.add(octave)
            return None
        if not self._tries_first and self._credit < self._price:
            return None
        doubt = self.errors.doubt(num_seqs, 3 * num_seqs)
        counts = hopeful(_DOUBTS * doubt) if doubt > _DOUBT else []
        if not any(counts):
            self._credit = 0.0
            return None
        counts = [max(1, (count + 1) // 2) for count in counts]
        self._price = price(sum(counts))
        if not self._tries_first and self._credit < self._price:
            return None
        self._tries_first = False
        self._credit = 0.0
        return counts
