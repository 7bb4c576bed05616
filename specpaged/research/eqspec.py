"""EQSPEC's batches (arXiv 2510.22876): fixed, from their first step until all of their sequences have ended."""

from __future__ import annotations

from itertools import islice
from typing import Any

from typing_extensions import override

from specpaged.engine.sequence import Sequence
from specpaged.scheduling.continuous import ContinuousScheduler


class EqspecScheduler(ContinuousScheduler):
    """Nobody joins a batch that runs. A sequence that has ended leaves its place empty, and costs no work."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.batch: set[Sequence] = set()  # its sequences that have not ended: they run, or wait for room

    @override
    def finish(self, sequence: Sequence) -> None:
        super().finish(sequence)
        self.batch.discard(sequence)

    @override
    def _candidates(self) -> list[Sequence]:
        if not self.batch:
            self.batch = set(islice(self.waiting, self.max_num_seqs))
        return super()._candidates()

    @override
    def _has_room(self, num_scheduled: int) -> bool:
        return self.waiting[0] in self.batch
