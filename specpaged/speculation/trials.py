"""Plain steps amid such as draft: they tell what drafting really takes beside them."""

from __future__ import annotations

import math

_FIRST, _MOST = 8, 64  # steps that draft, between two trials: the first ones come soon
_RATE = 0.3  # of what one pass, or trial, says
_MOST_DEARER = 0.5  # in the logarithm
_RECENT = 8  # passes that have been told of
_FORGETTING = 0.98  # in a plan without drafts: what was dear once is tried again


class Trials:
    """How much dearer passes with drafts are, beside passes without, than is believed: `dearer`, in the logarithm.

    What passes take beside each other depends on how quick memory is at the moment, and whoever drafts in every step
    sees one kind alone. Of a pass without drafts between others the surprises, logarithms of seen / expected, are
    compared: what slows everything is in both.
    """

    def __init__(self) -> None:
        self.dearer = 0.0
        self._of_drafting = 0.0  # surprises of passes with drafts, averaged
        self._age = _RECENT  # passes since one had drafts
        self._every = _FIRST
        self._num_steps = 0  # that drafted, since the last trial

    @property
    def factor(self) -> float:
        """By which passes with drafts take longer."""
        return math.exp(self.dearer)

    def is_due(self, num_steps: int) -> bool:
        """Whether a step should go without drafts, `num_steps` having drafted since it was asked last."""
        self._num_steps += num_steps
        if self._num_steps < self._every:
            return False
        self._num_steps, self._every = 0, min(_MOST, 2 * self._every)
        return True

    def observe(self, has_drafts: bool, seconds: float, expected: float) -> None:
        """What a pass of the target has taken, and what was believed."""
        if not (seconds > 0 and expected > 0):
            return
        surprise = math.log(seconds / expected) - self.dearer * has_drafts
        if has_drafts:
            self._of_drafting = surprise if self._age >= _RECENT else (1 - _RATE) * self._of_drafting + _RATE * surprise
            self._age = 0
        elif self._age < _RECENT:
            self._age += 1
            dearer = self.dearer + _RATE * (self._of_drafting - surprise)
            self.dearer = min(_MOST_DEARER, max(-_MOST_DEARER, dearer))

    def pause(self) -> None:
        """Nobody drafts for now."""
        self.dearer *= _FORGETTING
