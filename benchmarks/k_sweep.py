"""One engine at one B with every K from 0 to 8: what K pays there."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.contenders import OUTPUT_LEN
from benchmarks.ours import Ours

MOST_DRAFTS = 8


class KSweep:
    """Every K once per round, in an order that rotates; K = 0 is plain decoding."""

    def __init__(self, prompts: Sequence[Sequence[int]], batch_size: int):
        self.prompts, self.batch_size = prompts, batch_size
        self.ours = Ours("by K", "exact", OUTPUT_LEN, num_speculative_tokens=MOST_DRAFTS)
        self.ours.run(prompts[:batch_size], batch_size)  # warms up
        self.speeds: list[dict[int, float]] = []

    def play(self) -> None:
        """One round."""
        ks = list(range(MOST_DRAFTS + 1))
        first = len(self.speeds) * 4 % len(ks)
        runs = {k: self.ours.run(self.prompts, self.batch_size, k) for k in ks[first:] + ks[:first]}
        assert all(run.token_ids == runs[0].token_ids for run in runs.values())
        self.speeds.append({k: run.tokens_per_second for k, run in runs.items()})

    def summary(self) -> dict[str, Any]:
        """Each K's ratio to K = 0, and the best K."""
        over_plain = {}
        for k in range(MOST_DRAFTS + 1):
            ratios = [speeds[k] / speeds[0] for speeds in self.speeds]
            over_plain[str(k)] = {name: round(of(ratios), 3) for name, of in STATISTICS.items()}
        best = max(range(MOST_DRAFTS + 1), key=lambda k: over_plain[str(k)]["median"])
        return {"over_plain": over_plain, "best": best}


STATISTICS = {"median": median, "min": min, "max": max}
