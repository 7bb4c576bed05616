"""How long to train, and the learning rate on the way. No torch."""

from __future__ import annotations

from dataclasses import dataclass

WARM_UP_STEPS = 20
DECAY_SHARE = 0.35  # of the steps, at the end


@dataclass
class Budget:
    """Warm-up, a constant rate, and a linear fall to zero, as functions of the step alone.

    With a number of steps all is known at the start. With seconds, the fall begins once its share of them is left, and
    takes as many steps as the time before it did, in proportion: which step that was is part of a run's position, so
    that a run which is cut and resumed has the rates of one that was not.
    """

    steps: int | None
    seconds: float | None
    decay_start: int | None = None
    end: int | None = None

    def __post_init__(self) -> None:
        if self.steps is not None:
            self.end = self.steps
            self.decay_start = self.steps - int(DECAY_SHARE * self.steps)

    def observe(self, step: int, elapsed: float) -> None:
        """`step` steps have been made in `elapsed` seconds: the fall may begin."""
        if self.end is None and self.seconds is not None and elapsed >= (1 - DECAY_SHARE) * self.seconds:
            left = max(0.0, self.seconds - elapsed)
            self.decay_start = step
            self.end = step + max(1, int(step * left / max(elapsed, 1e-9)))

    def is_over(self, step: int) -> bool:
        """Whether step `step`, from 0 on, is not to be made."""
        return self.end is not None and step >= self.end

    def progress(self, step: int, elapsed: float) -> float:
        """0 to 1."""
        if self.end is not None and self.seconds is None:
            return step / self.end
        if self.end is not None:
            share = (step - self.decay_start) / max(1, self.end - self.decay_start)
            return min(1.0, 1 - DECAY_SHARE * (1 - share))
        return min(1.0, elapsed / self.seconds)

    def rate_factor(self, step: int) -> float:
        """Of the learning rate, in step `step`."""
        warm_up = WARM_UP_STEPS if self.steps is None else min(WARM_UP_STEPS, max(1, self.steps // 10))
        factor = min(1.0, (step + 1) / warm_up)
        if self.end is not None and step >= self.decay_start:
            factor = min(factor, (self.end - step) / max(1, self.end - self.decay_start))
        return factor
