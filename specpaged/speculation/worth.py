"""Whether to go on asking a drafter that has no model: what it will find, and what that takes, nobody can foresee."""

from __future__ import annotations

import math

TRY_STEPS = 4
_LEAST, _AGAIN = 0.98, 1.0  # of plain decoding's speed: below the one nobody asks any more, above the other one does
_AT_FIRST = 1.05  # that speed: nothing is known, and to find out takes little
_RATE, _RATE_OF_TRIES = 0.02, 0.2  # of the averages, for the newest proposal
_MOST = 16  # proposals that one of them may speak for
_KNOWN = 32  # proposals that say something
_TRYING = 0.01  # of the time, that goes into trying again
_SAVED = 4.0  # tries at most, that time is saved for


class Worth:
    """What steps with its proposals have promised lately, over plain decoding's speed.

    Of all proposals it is counted whether anything was found; of some of them it is said what steps with that promise.
    The tokens and the time of plain steps are both 1. Where drafts are slower, the drafter is asked for a few steps now
    and then: one that takes next to nothing often, one that takes long seldom.
    """

    def __init__(self) -> None:
        self.pays = True  # whether to ask it in every step
        self._tokens, self._seconds = _AT_FIRST / _RATE, 1.0 / _RATE  # sums that forget
        self._num_found = self._num_empty = 0  # proposals that nobody has spoken for
        self._num_known = 0
        self._credit = 0.0  # seconds

    @property
    def speed(self) -> float:
        """Over plain decoding's."""
        return self._tokens / self._seconds

    @property
    def is_known(self) -> bool:
        """Whether it need not be heard of every proposal."""
        return self.pays and self._num_known >= _KNOWN

    def count(self, found: bool) -> bool:
        """A proposal has found something, or nothing. Whether so many have not that it is time to `add` them."""
        self._num_found += found
        self._num_empty += not found
        return self._num_empty >= _MOST and not self._num_found

    def add(self, tokens: float, seconds: float, of_empty: float) -> None:
        """A step behind a proposal that has found something promises so many tokens of each sequence, in so many plain
        steps; behind one that has not, it takes `of_empty`. They speak for all since the last ones.
        """
        num = self._num_found + self._num_empty
        if not num:
            return
        found = self._num_found / num
        self._num_found = self._num_empty = 0
        self._num_known += num
        kept = (1.0 - (_RATE if self.pays else _RATE_OF_TRIES)) ** min(num, _MOST)
        weight = (1.0 - kept) / _RATE
        self._tokens = kept * self._tokens + weight * (found * tokens + 1.0 - found)
        self._seconds = kept * self._seconds + weight * (found * seconds + (1.0 - found) * of_empty)
        self.pays = self.speed >= (_LEAST if self.pays else _AGAIN)

    def earn(self, seconds: float) -> None:
        """So much time has gone by, of which a share may go into trying."""
        self._credit += _TRYING * seconds

    def tries(self, price: float) -> bool:
        """Whether to ask it again for some steps, all of which take `price` seconds more than plain ones."""
        self._credit = min(self._credit, _SAVED * price)
        if self._credit < price:
            return False
        self._credit -= price
        return True

    def steps_until_try(self, price: float, plain_seconds: float) -> int:
        """Plain steps, until there is time for a try."""
        return max(1, math.ceil((price - self._credit) / (_TRYING * plain_seconds)))
