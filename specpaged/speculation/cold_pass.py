"""What the first draft of a round takes more than those that follow it, told apart from how slow all of them are."""

from __future__ import annotations

_COLD, _SCALE = 2.0, 0.3  # what is uncertain at first: of the first pass, and of what all take, in parts of it
_LEAST = 0.1  # of what all take, the first one, for that
_WANDERS = 0.01  # of each, from one round that is seen to the next
_NOISE = 0.08  # of a round
_STANDS_OUT = 3.0  # standard deviations: more is believed of a round only if the last one was that far off, too


class ColdPass:
    """A Kalman filter of two unknowns: rounds whose passes were thought to take S seconds take `seconds` + scale * S.

    Behind a target's pass a draft model's weights are out of the caches, and the first pass of a round reads them from
    memory; those that follow find them where that has left them, as a probe's passes do. Rounds of several depths tell
    the two apart; as long as there are none, most is put down to the first pass, as a probe knows nothing of that.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._variance, self._both, self._of_scale = 0.0, 0.0, _SCALE**2  # of seconds, with scale, and of that
        self._stood_out = 0.0  # by how many deviations, the last one

    def observe(self, first: float, passes: float, seen: float) -> float:
        """A round has taken `seen` seconds, whose passes were thought to take so many, and the first of them so many.
        Returns how many times as long they take as was thought.
        """
        self._variance = self._variance or (_COLD * max(first, _LEAST * passes)) ** 2
        expected = self.seconds + passes
        self._variance += (_WANDERS * expected) ** 2
        self._of_scale += _WANDERS**2
        with_seconds = self._variance + passes * self._both
        with_scale = self._both + passes * self._of_scale
        variance = with_seconds + passes * with_scale + (_NOISE * expected) ** 2
        innovation = seen - expected
        before, self._stood_out = self._stood_out, innovation / variance**0.5
        was_as_far = abs(before) > _STANDS_OUT and before * self._stood_out > 0.0
        if abs(self._stood_out) > _STANDS_OUT and not was_as_far:
            return 1.0
        seconds = self.seconds + with_seconds / variance * innovation
        scale = max(0.5, 1.0 + with_scale / variance * innovation)
        self.seconds = max(0.0, seconds)
        self._variance -= with_seconds**2 / variance
        self._both = (self._both - with_seconds * with_scale / variance) / scale
        self._of_scale = (self._of_scale - with_scale**2 / variance) / scale**2
        return scale
