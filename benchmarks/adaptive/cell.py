"""One pair at one batch size: plain decoding, every fixed K and the decisions of every step, in turn."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median, quantiles, stdev
from typing import Any

from typing_extensions import override

from benchmarks.adaptive.pairs import Pair
from benchmarks.ours import Ours, Run, Stint, models_loaded_once, take_turns
from specpaged import SamplingParams
from specpaged.metrics import EngineMetrics
from specpaged.speculative_config import DEFAULT_TETRIS_EXTRA

PLAIN, ADAPTIVE = "plain", "adaptive"
AGAIN = "plain again"  # how far apart two engines are that do the same: the noise of the cell
SWING = "1-64"  # the batch size of the cell whose requests come now all at once, now one after another
BURST, SINGLES, SWINGS = 64, 12, 2
FEWEST = 4  # requests of a round


def ways_of(ks: Sequence[int], tetris: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Plain decoding twice, every fixed K, TETRIS with some ("2+1": K = 2, and one extra), and adaptive."""
    ways = {PLAIN: {"num_speculative_tokens": 0}}
    ways |= {f"K = {k}": {"num_speculative_tokens": k} for k in ks}
    for of in tetris:
        k, extra = map(int, of.split("+") if "+" in of else (of, DEFAULT_TETRIS_EXTRA))
        tetris_of = {"selection": "tetris", "num_speculative_tokens": k, "tetris_extra_proposals": extra}
        ways[f"TETRIS {k} + {extra}"] = tetris_of
    return ways | {AGAIN: ways[PLAIN], ADAPTIVE: {"num_speculative_tokens": "auto"}}


class Engines:
    """The engines of a pair, loaded once: one for each way to draft, which may name another drafter than the pair's."""

    def __init__(self, pair: Pair, ways: Mapping[str, dict[str, Any]]):
        self.pair = pair
        self._rng = random.Random(0)
        with models_loaded_once():
            self.contenders = {
                name: Ours(name, "exact", pair.output_len, pair.target, **pair.speculative | speculative)
                for name, speculative in ways.items()
            }

    def play(self, batch_size: int | str, rounds: int) -> list[dict[str, Run]]:
        """So many rounds of prompts at this batch size, or of swings, and what each contender did in them; its first
        requests are in none.
        """
        pool = self.pair.prompts
        kind, size = (Swing, BURST) if batch_size == SWING else (Requests, int(batch_size))
        count = SWINGS * (BURST + SINGLES) if kind is Swing else max(FEWEST, size * self.pair.prompts_per_seq)
        for ours in self.contenders.values():  # warms up
            ours.run(pool[: max(16, size)], size)
        return [
            self._round(kind, [pool[j % len(pool)] for j in range(i * count, (i + 1) * count)], size)
            for i in range(rounds)
        ]

    def _round(self, kind: type[Stint], prompts: Sequence[Sequence[int]], batch_size: int) -> dict[str, Run]:
        """All contenders through the same prompts, by turns, in an order drawn anew: the first finds cold caches."""
        stints = {name: kind(ours, prompts, batch_size) for name, ours in self.contenders.items()}
        in_order = list(stints.values())
        self._rng.shuffle(in_order)
        gc.collect()
        take_turns(in_order)
        runs = {name: stint.run() for name, stint in stints.items()}
        wrong = [name for name, run in runs.items() if run.token_ids != runs[PLAIN].token_ids]
        assert not wrong, f"{self.pair.name}, B = {batch_size}: outputs of {wrong} are not those of plain decoding"
        return runs


class Requests(Stint):
    """Outputs of any length from half of the pair's to as much more: were they of a few lengths, plain decoding alone
    would have several end in one step, and prefill those who come in their place in one pass.
    """

    def __init__(self, ours: Ours, prompts: Sequence[Sequence[int]], batch_size: int):
        super().__init__(ours, prompts, batch_size)
        rng, mean = random.Random(0), self.params.max_tokens
        self._params = [replace(self.params, max_tokens=rng.randint(mean // 2, mean + mean // 2)) for _ in prompts]

    @override
    def params_of(self, index: int) -> SamplingParams:
        return self._params[index]


class Swing(Requests):
    """Now 64 at once, now one after another; each when all before it have ended."""

    def __init__(self, ours: Ours, prompts: Sequence[Sequence[int]], batch_size: int):
        super().__init__(ours, prompts, batch_size)
        self._num_come = 0

    @override
    def num_admitted(self, num_running: int) -> int:
        if num_running:
            return 0
        count = 1 if self._num_come % (BURST + SINGLES) >= BURST else BURST
        self._num_come += count
        return count


def summary_of(played: Sequence[dict[str, Run]]) -> dict[str, Any]:
    """What a cell came to: medians over its rounds of each contender's speed over plain decoding's in the same round;
    who is best.
    """
    ratios = {
        name: sorted(runs[name].tokens_per_second / runs[PLAIN].tokens_per_second for runs in played)
        for name in played[0]
    }
    over_plain = {name: median(values) for name, values in ratios.items()}
    fixed = {name: value for name, value in over_plain.items() if name not in (PLAIN, AGAIN, ADAPTIVE)}
    best = max(fixed, key=fixed.__getitem__, default=PLAIN)
    if over_plain[best] < 1:
        best = PLAIN
    over_best = [runs[ADAPTIVE].tokens_per_second / runs[best].tokens_per_second for runs in played]
    metrics = [runs[ADAPTIVE].metrics for runs in played]
    verified = sum(m.draft_tokens for m in metrics)
    emitted = sum(m.emitted_tokens for m in metrics)
    return {
        "rounds": len(played),
        "plain_tokens_per_second": round(median(runs[PLAIN].tokens_per_second for runs in played), 1),
        "over_plain": {name: round(value, 3) for name, value in over_plain.items()},
        "error": {name: _error(values) for name, values in ratios.items()},
        "spread": {name: [round(values[0], 3), round(values[-1], 3)] for name, values in ratios.items()},
        "best": best,
        "over_best": round(median(over_best), 3),
        "p99": {name: round(median(_p99(runs[name]) / _p99(runs[PLAIN]) for runs in played), 3) for name in ratios},
        "deciding": round(median(runs[ADAPTIVE].deciding_seconds / runs[ADAPTIVE].seconds for runs in played), 4),
        "verified_per_token": round(verified / emitted, 3),
        "acceptance": round(sum(m.accepted_tokens for m in metrics) / verified, 3) if verified else None,
        "tetris_metrics": {name: _tetris_metrics([runs[name].metrics for runs in played]) for name in ratios},
    }


def _error(values: Sequence[float]) -> float | None:
    """The standard deviation of their median, as far as they show it: were they normal, 1.25 times their mean's."""
    return round(1.25 * stdev(values) / math.sqrt(len(values)), 4) if len(values) > 1 else None


def _tetris_metrics(metrics: Sequence[EngineMetrics]) -> dict[str, float] | None:
    """The two that the paper of TETRIS (2502.15197) has; None of who drafted nothing."""
    accepted, verified, drafted = (
        sum(getattr(m, name) for m in metrics) for name in ("accepted_tokens", "draft_tokens", "proposed_tokens")
    )
    if not verified:
        return None
    return {"verification_success": round(accepted / verified, 3), "token_efficiency": round(accepted / drafted, 3)}


def _p99(run: Run) -> float:
    return quantiles(run.latencies, n=100, method="inclusive")[98] if len(run.latencies) > 1 else run.latencies[0]
