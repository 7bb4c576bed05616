"""EXSPEC's batches (arXiv 2510.22876): out of a window, and of one length wherever that can be."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from specpaged.engine.sequence import Sequence
from specpaged.scheduling.continuous import ContinuousScheduler


class ExspecScheduler(ContinuousScheduler):
    """A window of W > B sequences holds KV, and each round runs B of them.

    Who is new to the window is prefilled before anybody drafts on. Then the round goes to the oldest B sequences of one
    length, and where no length has B of them (or all, where the window holds fewer), to the first B of the window: the
    oldest, or the shortest if it is sorted by length. A sequence that has ended is replaced before the next round.

        window, by age    A 52   B 47   C 52   D 60   E 47        B = 2: A and C are grouped
                          A 54   B 47   C 53   D 60   E 47               B and E
                          A 54   B 51   C 53   D 60   E 49               A and B fall back; sorted: B and E

    Sorted, those who are behind catch up and lengths meet more often. Either way a sequence of a length that nobody
    else has may wait for long: this is what the paper's P99 latencies come from.
    """

    def __init__(self, *arguments: Any, window: int, sort_by_length: bool = False, **options: Any):
        super().__init__(*arguments, **options)
        self.window = window
        self.sort_by_length = sort_by_length
        self.group_by_length = True  # False: every round falls back, as a study may ask

    @override
    def _candidates(self) -> list[Sequence]:
        prefilling = [sequence for sequence in self.running if self._num_missing(sequence) > 1]
        if prefilling:
            return prefilling[: self.max_num_seqs]
        if self.waiting and len(self.running) < self.window and self._make_room(self.waiting[0].num_tokens, 0):
            return []  # the round goes to those that join the window
        return self._next_batch()

    @override
    def _has_room(self, num_scheduled: int) -> bool:
        return len(self.running) < self.window and num_scheduled < self.max_num_seqs

    def _next_batch(self) -> list[Sequence]:
        """The round's sequences in order of age, by which sequences are preempted.

        The round is counted as grouped or as a fallback where there is a choice.
        """
        size = min(self.max_num_seqs, len(self.running))
        counts = 1 < size == self.max_num_seqs  # fewer than B are what the end of a run leaves
        if self.group_by_length:
            by_length: dict[int, list[Sequence]] = {}
            for sequence in self.running:
                by_length.setdefault(sequence.num_tokens, []).append(sequence)
            for sequences in by_length.values():  # the oldest sequence's length first
                if len(sequences) >= size:
                    self.num_grouped_rounds += counts
                    return sequences[:size]
        self.num_fallback_rounds += counts
        if not self.sort_by_length:
            return self.running[:size]
        shortest = set(sorted(self.running, key=lambda sequence: sequence.num_tokens)[:size])
        return [sequence for sequence in self.running if sequence in shortest]
