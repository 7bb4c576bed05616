"""For how long a plan is followed."""

from __future__ import annotations

# Steps; with drafts, half as many more as it is for sequences. Twice as many, up to the most, where the last one was
# the same.
_FIRST, _MOST = 6, 32


class PlanLength:
    """The longer, the longer plans have been the same."""

    def __init__(self) -> None:
        self._counts: list[int] = []  # of the last plan
        self._steps = _FIRST  # that it was good for

    def of(self, counts: list[int]) -> int:
        """Steps that so many drafts of each sequence are good for."""
        same = counts == self._counts or not (any(counts) or any(self._counts))
        first = _FIRST + len(counts) // 2 if any(counts) else _FIRST
        self._steps = min(_MOST, 2 * self._steps if same else first)
        self._counts = counts
        return self._steps
