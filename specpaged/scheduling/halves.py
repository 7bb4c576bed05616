"""Continuous batching by halves: a step takes one of them, while drafts are made for the other."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from typing_extensions import override

from specpaged.engine.scheduler import ScheduledStep
from specpaged.engine.sequence import Sequence
from specpaged.paging.block_allocator import IntegrityError
from specpaged.scheduling.continuous import ContinuousScheduler

DRIFT = 8  # halves that differ by one of so many sequences are as good as even


class HalvesScheduler(ContinuousScheduler):
    """ContinuousScheduler of a batch in two halves that take turns, or of all of it.

    With a turn, a step takes that half's sequences, but for those whose drafts are being made. Who comes belongs to the
    smaller half, and runs at once, whoever's turn it is: no drafts of theirs are being made yet. Where halves have
    drifted apart, as sequences end when they end, the youngest of the larger one change over:

        turn 0      half 0  a c e g i       half 1  b d         i and g change over: both wait for a step, and have
        turn 1      half 0  a c e           half 1  b d g i     their drafts by then

    Preemption knows no halves: the youngest of all gives up its KV, though its drafts were to be made next.
    """

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self.turn: int | None = None  # the half that the next step takes, 0 or 1; None: everybody
        self.half_of: dict[Sequence, int] = {}  # of all who run, with a turn
        self.num_moved = 0  # sequences that have changed over
        self._drafting: Collection[Sequence] = ()

    def take_turn(self, turn: int | None, drafting: Collection[Sequence] = ()) -> None:
        """The next step takes this half of those who run, but for those whose drafts are being made; None: everybody,
        and nobody has a half.
        """
        self.turn, self._drafting = turn, drafting
        if turn is None:
            self.half_of.clear()

    @override
    def schedule(self) -> ScheduledStep:
        if self.turn is None:
            return super().schedule()
        self._divide()
        self._level()
        scheduled = super().schedule()
        self._divide()  # who has come
        return scheduled

    @override
    def _candidates(self) -> list[Sequence]:
        if self.turn is None:
            return super()._candidates()
        half_of, drafting = self.half_of, self._drafting
        return [s for s in self.running if half_of[s] == self.turn and s not in drafting]

    def _divide(self) -> None:
        """Everybody who runs has a half, newcomers the smaller one; who has gone has none."""
        known = self.half_of
        self.half_of = half_of = {s: known[s] for s in self.running if s in known}
        sizes = self.sizes
        for sequence in self.running:
            if sequence not in half_of:
                half = half_of[sequence] = int(sizes[1] < sizes[0])
                sizes[half] += 1

    def _level(self) -> None:
        """Make halves even again that have drifted apart."""
        sizes = self.sizes
        larger = int(sizes[1] > sizes[0])
        excess = sizes[larger] - sizes[1 - larger]
        if excess <= max(1, len(self.running) // DRIFT):
            return
        of_larger = [sequence for sequence in self.running if self.half_of[sequence] == larger]
        for sequence in of_larger[-(excess // 2) :]:
            self.half_of[sequence] = 1 - larger
        self.num_moved += excess // 2

    @property
    def sizes(self) -> list[int]:
        """How many of those who run belong to each half."""
        num_second = sum(self.half_of.values())
        return [len(self.half_of) - num_second, num_second]

    @override
    def check_integrity(self) -> None:
        super().check_integrity()
        if self.turn is None and self.half_of:
            raise IntegrityError(f"{len(self.half_of)} sequences belong to a half, and there are none")
        if not set(self.half_of.values()) <= {0, 1}:
            raise IntegrityError(f"halves are 0 and 1; sequences belong to {sorted(set(self.half_of.values()))}")
