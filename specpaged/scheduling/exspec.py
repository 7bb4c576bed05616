"""EXSPEC's batches (arXiv 2510.22876): out of a window, and of one length wherever that can be."""

from __future__ import annotations

from bisect import insort
from typing import Any

from specpaged.scheduling.continuous import ContinuousScheduler
from specpaged.sequence import Sequence


class ExspecScheduler(ContinuousScheduler):
    """A window of W > B sequences holds KV, and each round runs B of them.

    Who is new to the window is prefilled before anybody drafts on. Then the round goes to the oldest B sequences of one
    length, and where no length has B of them (or all, where the window holds fewer), to the B shortest: those who are
    behind catch up, and lengths meet again. A sequence that has ended is replaced before the next round.

        window, by age    A 52   B 47   C 52   D 60   E 47        B = 2: A and C are grouped
                          A 54   B 47   C 53   D 60   E 47               B and E
                          A 54   B 51   C 53   D 60   E 49               B and E again, who fall back
    """

    def __init__(self, *arguments: Any, window: int, sort_by_length: bool = False, **options: Any):
        super().__init__(*arguments, **options)
        self.window = window
        self.sort_by_length = sort_by_length
        self.group_by_length = True  # False: every round falls back, as a study may ask

    def add(self, sequence: Sequence) -> None:
        """See ContinuousScheduler; behind those that are no longer, if that is asked for."""
        if self.sort_by_length:
            insort(self.waiting, sequence, key=lambda waiting: waiting.num_tokens)
        else:
            super().add(sequence)

    def _candidates(self) -> list[Sequence]:
        prefilling = [sequence for sequence in self.running if self._num_missing(sequence) > 1]
        if prefilling:
            return prefilling[: self.max_num_seqs]
        if self.waiting and len(self.running) < self.window and self._fits(self.waiting[0].num_tokens, 0):
            return []  # the round goes to those that join the window
        return self._group()

    def _has_room(self, num_scheduled: int) -> bool:
        return len(self.running) < self.window and num_scheduled < self.max_num_seqs

    def _group(self) -> list[Sequence]:
        size = min(self.max_num_seqs, len(self.running))
        if self.group_by_length:
            by_length: dict[int, list[Sequence]] = {}
            for sequence in self.running:
                by_length.setdefault(sequence.num_tokens, []).append(sequence)
            for sequences in by_length.values():  # the oldest sequence's length first
                if len(sequences) >= size:
                    self.num_grouped_rounds += size > 1
                    return sequences[:size]
        self.num_fallback_rounds += size > 1
        shortest = set(sorted(self.running, key=lambda sequence: sequence.num_tokens)[:size])
        return [sequence for sequence in self.running if sequence in shortest]  # by age, as who is preempted goes by it
