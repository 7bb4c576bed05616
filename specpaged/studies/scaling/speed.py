"""What needs a clock: rounds by size, batch and K; a sweep of sizes, each at its best K; and one draft by batch size.

The one part of the study that other work on the machine disturbs. It takes minutes, and is a stage of its own. By the
clock "cpu" only the time counts in which this process runs, as neighbours on its core leave it; who has several threads
needs "wall".
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from specpaged.comparison.round_timer import RoundTimer
from specpaged.llm import LLM
from specpaged.sampling_params import SamplingParams
from specpaged.studies.result import Row, spread
from specpaged.studies.scaling.counts import MOST_DRAFTS, Counts
from specpaged.studies.scaling.drafts import DraftPoint
from specpaged.studies.workload import Pair, Run, Workload

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
TIMED_LEN = 512  # positions of engines whose rounds are timed
Progress = Callable[[str, int], Callable[[int], object]]


@dataclass(frozen=True)
class Clocked:
    """What is decoded, by which target, and how long is spent on it."""

    target: str
    prompts: list[list[int]]
    max_tokens: int
    longest: int  # positions of the target
    rounds: int  # turns of everybody in a sweep
    round_seconds: float  # of timing rounds, for each draft and batch size
    clock: str  # of CLOCKS

    def llm(self, draft: DraftPoint | None, num_drafts: int, batch_size: int, max_model_len: int | None = None) -> LLM:
        """An engine of its defaults, but for a fixed K; of no draft one that decodes plainly."""
        speculative = None
        if draft is not None:
            speculative = {"model": draft.path, "num_speculative_tokens": num_drafts}
        if max_model_len is None:
            max_model_len = min(self.longest, max(map(len, self.prompts)) + self.max_tokens + 1)
        return LLM(self.target, speculative_config=speculative, max_num_seqs=batch_size, max_model_len=max_model_len)

    @property
    def params(self) -> SamplingParams:
        """Greedy, as acceptance is counted."""
        return SamplingParams(temperature=0.0, max_tokens=self.max_tokens, detokenize=False)

    def decode(self, llm: LLM, num_prompts: int | None = None) -> Run:
        """All prompts, or the first ones, as all studies decode theirs; in seconds of the clock."""
        clock = CLOCKS[self.clock]
        start = clock()
        prompts = self.prompts[:num_prompts]
        run = Workload(Pair(self.target, ""), prompts, self.params, 0, None, {}, 0).decode(llm)
        return replace(run, seconds=clock() - start)


def time_rounds(clocked: Clocked, draft: DraftPoint, batch_sizes: Sequence[int]) -> dict[int, list[float]]:
    """By batch size the seconds of a round at each K, 0 first. ValueError where there is no KV for one of the sizes."""
    llm = clocked.llm(draft, MOST_DRAFTS, max(batch_sizes), min(TIMED_LEN, clocked.longest))
    timer = RoundTimer(llm.engine, clocked.prompts, clocked.params, CLOCKS[clocked.clock])
    seconds = {}
    for batch_size in batch_sizes:
        of_size = timer.round_seconds(batch_size, llm.config.num_scheduler_steps, clocked.round_seconds)
        if of_size is None:
            raise ValueError(f"--batch-sizes: there is no KV for {batch_size} sequences; allowed: smaller ones")
        seconds[batch_size] = of_size
    return seconds


def best_k(counts: Counts, seconds: Sequence[float]) -> tuple[int, float]:
    """The K that acceptance and rounds of one draft promise most of, and the speed over plain decoding."""
    speeds = {k: counts.tokens(k) * seconds[0] / seconds[k] for k in range(1, MOST_DRAFTS + 1)}
    best = max(speeds, key=lambda k: (speeds[k], -k))
    return best, speeds[best]


def play(clocked: Clocked, llms: Mapping[Any, LLM], advance: Callable[[int], object]) -> dict[Any, list[Run]]:
    """All engines by turns, in an order that rotates, each warmed up before; the runs of each."""
    runs: dict[Any, list[Run]] = {key: [] for key in llms}
    for llm in llms.values():
        clocked.decode(llm, llm.config.max_num_seqs)
        advance(1)
    keys = list(llms)
    for i in range(clocked.rounds):
        first = i % len(keys)
        for key in [*keys[first:], *keys[:first]]:
            gc.collect()  # one engine's garbage is not collected in another one's time
            runs[key].append(clocked.decode(llms[key]))
            advance(1)
    return runs


def sweep(
    clocked: Clocked, chosen: Mapping[DraftPoint, tuple[int, float]], batch_size: int, progress: Progress
) -> list[Row]:
    """Speed over plain decoding, measured, of drafts each with a K of its own, beside what was promised of it."""
    llms: dict[DraftPoint | None, LLM] = {None: clocked.llm(None, 0, batch_size)}
    llms |= {draft: clocked.llm(draft, k, batch_size) for draft, (k, _) in chosen.items()}
    runs = play(clocked, llms, progress(f"sweep, B = {batch_size}", len(llms) * (1 + clocked.rounds)))
    plain = runs.pop(None)
    rows: list[Row] = []
    for draft, of_draft in runs.items():
        ratios = [a.tokens_per_second / b.tokens_per_second for a, b in zip(of_draft, plain, strict=True)]
        k, promised = chosen[draft]
        rows.append(
            {
                "B": batch_size,
                **draft.as_dict(),
                "K": k,
                "speed": spread(ratios),
                "promised": round(promised, 4),
                "identical": sum(a.token_ids == b.token_ids for a, b in zip(of_draft, plain, strict=True)),
                "rounds": clocked.rounds,
            }
        )
    return rows


def by_batch_size(
    clocked: Clocked, draft: DraftPoint, num_drafts: int, batch_sizes: Sequence[int], progress: Progress
) -> list[Row]:
    """One draft at one K, and plain decoding, by batch size: tokens of a round, and tokens a second."""
    rows: list[Row] = []
    for batch_size in batch_sizes:
        llms = {"plain": clocked.llm(None, 0, batch_size), "draft": clocked.llm(draft, num_drafts, batch_size)}
        runs = play(clocked, llms, progress(f"{draft.name}, B = {batch_size}", 2 * (1 + clocked.rounds)))
        rows.append(
            {
                "B": batch_size,
                **draft.as_dict(),
                "K": num_drafts,
                "tokens_per_round": round(runs["draft"][0].metrics.mean_acceptance_length or 1.0, 4),
                **{f"{name}_speed": spread([run.tokens_per_second for run in runs[name]], 1) for name in runs},
            }
        )
    return rows


def plain_seconds(rounds: Sequence[Row], batch_size: int) -> float:
    """Of a plain round at a batch size, over all timed drafts."""
    return median(row["seconds"][0] for row in rounds if row["B"] == batch_size)
