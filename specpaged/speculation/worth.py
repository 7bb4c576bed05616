"""Whether to go on asking a drafter that has no model: what it will find, and what that takes, nobody can foresee."""

from __future__ import annotations

TRY_STEPS = 4
_AT_FIRST = 1.05  # nothing is known, and finding out takes little
_LEAST, _AGAIN = 0.98, 1.0  # of plain decoding's speed: below the one nobody asks any more, above the other one does
_RATE, _RATE_OF_TRIES = 0.03, 0.2  # of the average, for the newest step
_KNOWN = 32  # steps that tell
_MOST = 2.0  # times as fast: a single step is not to hide many
_TRYING = 0.01  # of the time, that goes into trying again
_SAVED = 4.0  # tries at most, that time is saved for


class Worth:
    """What steps with its proposals have promised lately, over plain decoding's speed.

    Where that is less, it is asked for a few steps now and then: a cheap drafter often, a dear one seldom.
    """

    def __init__(self) -> None:
        self.speed = _AT_FIRST
        self._pays = True
        self._num_steps = 0
        self._credit = 0.0  # seconds

    def add(self, speed: float) -> None:
        """A step with a proposal promises to be so many times as fast as a plain one."""
        self._num_steps += 1
        self.speed += (_RATE if self._pays else _RATE_OF_TRIES) * (min(_MOST, speed) - self.speed)
        self._pays = self.speed >= (_LEAST if self._pays else _AGAIN)

    @property
    def is_known(self) -> bool:
        """Whether it need not be heard of every step."""
        return self._pays and self._num_steps >= _KNOWN

    @property
    def pays(self) -> bool:
        """Whether to ask it in every step."""
        return self._pays

    def tries(self, seconds: float, price: float) -> bool:
        """Whether to ask it again for some steps, all of which take `price` more than plain ones: of the last
        `seconds`, in which it was not asked, a share may go into that.
        """
        self._credit = min(self._credit + _TRYING * seconds, _SAVED * price)
        if self._credit < price:
            return False
        self._credit -= price
        return True
