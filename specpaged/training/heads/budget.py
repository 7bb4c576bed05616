"""How long to train, and the learning rate on the way. No torch."""

from __future__ import annotations

from dataclasses import dataclass

WARM_UP_STEPS = 20
DECAY_SHARE = 0.35  # of the budget, at its end


@dataclass(frozen=True)
class Budget:
    """A number of steps, or seconds of training, kept however quick the steps are; the other one is None.

    The rate warms up, is constant, and falls to zero in a straight line: a function of steps made and seconds used,
    both of which are in a checkpoint, and of steps alone where these are counted.
    """

    steps: int | None
    seconds: float | None

    def progress(self, step: int, elapsed: float) -> float:
        """0 to 1, where `step` steps have been made in `elapsed` seconds."""
        return min(1.0, elapsed / self.seconds if self.steps is None else step / self.steps)

    def is_over(self, step: int, elapsed: float) -> bool:
        """Whether no further step is to be made."""
        return self.progress(step, elapsed) >= 1

    def rate_factor(self, step: int, elapsed: float) -> float:
        """Of the learning rate, in the step that comes then: above 0 unless the budget is over."""
        warm_up = WARM_UP_STEPS if self.steps is None else min(WARM_UP_STEPS, max(1, self.steps // 10))
        return min(1.0, (step + 1) / warm_up, (1 - self.progress(step, elapsed)) / DECAY_SHARE)
