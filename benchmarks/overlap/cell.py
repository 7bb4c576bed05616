"""One pair at one batch size: drafts behind the target, and beside it; and what each pass takes, alone and not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.adaptive.cell import PLAIN, Engines
from benchmarks.adaptive.pairs import Pair
from benchmarks.ours import Run
from benchmarks.overlap.lane_passes import LanePasses
from specpaged.speculation.overlap_choice import expected_ratio

SEQUENTIAL, ROUND_BY_ROUND, OVERLAP, AUTO = "sequential", "round by round", "overlap", "auto"
AGAIN = "sequential again"  # another engine, which says what a difference of engines is
CONTEXT = 96  # tokens of the sequences whose passes are timed


class Cells:
    """The engines of a pair, loaded once: of each schedule, with a fixed K; and plain decoding, for the outputs."""

    def __init__(self, pair: Pair, k: int, requests_per_seq: int):
        self.k = k
        engines = {
            SEQUENTIAL: {},
            AGAIN: {},
            ROUND_BY_ROUND: {"num_scheduler_steps": 1},  # as overlapped steps are
            OVERLAP: {"schedule": "overlap"},
            AUTO: {"schedule": "auto"},
        }
        ways: dict[str, dict[str, Any]] = {PLAIN: {"num_speculative_tokens": 0}}
        ways |= {name: {"num_speculative_tokens": k, "engine": engine} for name, engine in engines.items()}
        self.engines = Engines(replace(pair, prompts_per_seq=requests_per_seq), ways)

    def cell(self, batch_size: int, rounds: int) -> dict[str, Any]:
        """Speeds over the sequential schedule's, medians of the rounds' ratios; V and D; and what lanes cost."""
        played = self.engines.play(batch_size, rounds)
        ratios = {
            name: sorted(runs[name].tokens_per_second / runs[SEQUENTIAL].tokens_per_second for runs in played)
            for name in played[0]
        }
        verify, draft, rest = _milliseconds([runs[ROUND_BY_ROUND] for runs in played])
        ours = self.engines.contenders[OVERLAP]
        passes = LanePasses(ours.llm.engine, batch_size, self.k, CONTEXT).measure()
        halves = max(passes["verify_lane"], passes["draft_lane"])
        beside = max(passes["verify_beside"], passes["draft_beside"])
        overlapped = [runs[OVERLAP].metrics for runs in played]
        costs = self._costs()
        return {
            "rounds": len(played),
            "tokens_per_second": round(median(runs[SEQUENTIAL].tokens_per_second for runs in played), 1),
            "speeds": {name: round(median(values), 3) for name, values in ratios.items()},
            "spread": {name: [round(values[0], 3), round(values[-1], 3)] for name, values in ratios.items()},
            "verify_ms": verify,
            "draft_ms": draft,
            "rest_ms": rest,
            "model": round(max(verify, draft) / (verify + draft), 3),
            "passes_ms": passes,
            # Of a round, over V + D of all on all threads: two steps of the longer lane, alone and beside the other.
            "lanes_alone": round(2 * halves / (passes["verify_all"] + passes["draft_all"]), 3),
            "lanes_beside": round(2 * beside / (passes["verify_all"] + passes["draft_all"]), 3),
            "cost_model": None if costs is None else round(expected_ratio(costs, batch_size, self.k, CONTEXT), 3),
            "overlapped_share": round(
                sum(m.overlapped_steps for m in overlapped) / sum(m.steps for m in overlapped), 3
            ),
            "auto_overlapped": sum(runs[AUTO].metrics.overlapped_steps for runs in played),
        }

    def _costs(self) -> Any:
        """The cost model of the pair, as an engine that decides K would have it."""
        from specpaged.engine.cost_probe import measured_costs

        engine = self.engines.contenders[SEQUENTIAL].llm.engine
        return measured_costs(engine.target, engine.draft, engine.config.max_num_seqs * (1 + engine.max_draft_tokens))


def _milliseconds(runs: Sequence[Run]) -> tuple[float, float, float]:
    """Of a step: its target's pass with verification, its proposal, and the rest; prefill is among them."""
    steps = sum(run.metrics.steps for run in runs)
    verify = sum(run.metrics.seconds["score"] + run.metrics.seconds["verify"] for run in runs)
    draft = sum(run.metrics.seconds["propose"] for run in runs)
    rest = sum(run.seconds for run in runs) - verify - draft
    return round(1e3 * verify / steps, 3), round(1e3 * draft / steps, 3), round(1e3 * rest / steps, 3)
