"""What was decided for one sequence alone, some plans ago, for another one like it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

from specpaged.speculation.repaid_lag import RepaidLag
from specpaged.speculation.stop_rule import StopRule

ALIKE = 256  # tokens of context, of sequences for which the same is decided
_MEMORY = 8  # plans


class Decision(NamedTuple):
    """Drafts of each sequence, what they promise, and with a rule how many there may be."""

    counts: list[int]
    tokens_per_second: float
    deepest: list[int]
    stop_rule: StopRule | None
    lag_repaid: RepaidLag | None = None  # what a drafter may have to catch up with, so that it has any


class Decisions:
    """Remembers them for a few plans: where steps are short and requests, too, to plan is most of deciding."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Decision] = {}
        self._num_plans = 0  # since nothing was known

    def of(self, key: Hashable, decide: Callable[[], Decision]) -> Decision:
        """Of all that are alike by this key."""
        if self._num_plans >= _MEMORY:
            self.forget()
        self._num_plans += 1
        decision = self._known.get(key)
        if decision is None:
            decision = self._known[key] = decide()
        return decision

    def forget(self) -> None:
        """All is decided anew."""
        self._known.clear()
        self._num_plans = 0
