"""TETRIS as published, for comparison: a fixed number of drafts, of which the likeliest are verified."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate
from operator import mul

from typing_extensions import override

from specpaged.speculation.acceptance import sigmoid
from specpaged.speculation.controller import Candidate, Controller, Plan
from specpaged.speculation.selection import Chances


class TetrisController(Controller):
    """`num_drafts` + `num_extra` drafts for each of B sequences, of all of which the B * `num_drafts` likeliest are
    verified (S. Wu et al., 2502.15197). How likely a draft is to stand is what the drafter thinks of it: it learns
    nothing.
    """

    def __init__(self, num_drafts: int, num_extra: int):
        self.num_drafts = num_drafts
        self.num_extra = num_extra

    @override
    def plan(self, candidates: Sequence[Candidate], num_steps: int = 1) -> Plan:
        return Plan([min(c.most, self.num_drafts + self.num_extra) for c in candidates])

    @override
    def select(self, sequences: Sequence[Hashable], evidence: Sequence[Sequence[float]]) -> list[int]:
        chances = [list(accumulate((sigmoid(x) if x == x else 0.0 for x in of_draft), mul)) for of_draft in evidence]
        return tetris(chances, self.num_drafts * len(sequences))


def tetris(chances: Chances, capacity: int) -> list[int]:
    """How many drafts of each sequence to verify: the `capacity` likeliest ones, of equals those of shorter drafts."""
    order = sorted([(-chance, j, i) for i, of_sequence in enumerate(chances) for j, chance in enumerate(of_sequence)])
    counts = [0] * len(chances)
    for _, _, i in order[: max(0, capacity)]:
        counts[i] += 1
    return counts
