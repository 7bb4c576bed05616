"""What a forward pass costs at a batch: the physical bound of speculation there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.bare_loops import BareLoops
from benchmarks.ours import Ours
from benchmarks.roofline import Roof, beside_roofs, work_of_model
from specpaged.modeling.model_runner import ModelRunner
from specpaged.modeling.ragged_batch import RaggedRow, pack
from specpaged.paging.page_table import PageTable

REPETITIONS = 20
DRAFT_STEPS = 4
TURN = 0.02  # seconds, at most about, that a pass is repeated for


def run_pass(runner: ModelRunner, rows: list[RaggedRow], steps: int = 1) -> None:
    """A pass as an engine runs it, with the argmax of its logits; or several, as a draft makes them in one call."""
    vocab_size = runner.model.vocab_size
    if not runner.runs_greedy:
        batch = pack(rows, runner.kv_cache.block_size)
        runner.greedy_steps([batch] * steps, [None] * steps, vocab_size)
    elif steps > 1:
        runner.greedy(rows, vocab_size, [steps - 1] * len(rows), wants_logprobs=True)
    else:
        runner.greedy(rows, vocab_size)


def seconds_of(run: Callable[[], None]) -> float:
    """The median of what a pass takes in a turn of its own, behind one that brings back what others have driven out of
    the caches.
    """
    run()
    times: list[float] = []
    end = time.perf_counter() + TURN
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return median(times)


def forward_seconds(
    contenders: Sequence[Ours], sequences: Sequence[Sequence[int]], context_lens: Sequence[int], num_rows: Sequence[int]
) -> tuple[dict[tuple[str, str, int], float], dict[str, dict[str, Any]]]:
    """Median seconds of a pass over all sequences by (numerics, "target" | "draft", rows per sequence); and the
    target's passes beside their roofs, by "exact 1", which is numerics and rows, where our C++ kernels run them.

    Sequence i has KV for its first context_lens[i] tokens, and known tokens behind them for max(num_rows) rows.
    The draft's pass is one of the DRAFT_STEPS of one row that it makes in one call while drafting. All take turns, and
    so do the bare loops.
    """
    passes: dict[tuple[str, str, int], tuple[ModelRunner, list[RaggedRow]]] = {}
    tables: list[PageTable] = []
    for ours in contenders:
        engine = ours.llm.engine
        block_size = ours.llm.config.block_size
        held = [PageTable(engine.allocator, block_size) for _ in sequences]
        tables += held
        for table, length in zip(held, context_lens, strict=True):
            table.reserve(length + max(num_rows))

        def of_rows(rows: int, held=held) -> list[RaggedRow]:
            return [
                RaggedRow(tokens[length : length + rows], length, table.blocks, rows)
                for tokens, length, table in zip(sequences, context_lens, held, strict=True)
            ]

        for runner in (engine.target, engine.draft):
            for tokens, length, table in zip(sequences, context_lens, held, strict=True):
                runner.forward(pack([RaggedRow(tokens[:length], 0, table.blocks, 1)], block_size))
        for rows in num_rows:
            passes[ours.numerics, "target", rows] = engine.target, of_rows(rows)
        passes[ours.numerics, "draft", 1] = engine.draft, of_rows(1)

    works = {
        key: work_of_model(runner.model, context_lens, [len(row.token_ids) for row in rows])
        for key, (runner, rows) in passes.items()
        if key[1] == "target" and runner.model.backend == "cpp"
    }
    num_bytes = max((work.num_bytes for work in works.values()), default=0)
    loops = BareLoops(num_bytes, torch.get_num_threads()) if works else None
    roofs: list[Roof] = []
    seconds: dict[tuple[str, str, int], list[float]] = {key: [] for key in passes}
    for repetition in range(REPETITIONS + 1):
        if loops is not None:
            roofs.append(loops.measure())
        for key, (runner, rows) in passes.items():
            steps = DRAFT_STEPS if key[1] == "draft" else 1
            elapsed = seconds_of(partial(run_pass, runner, rows, steps))
            if repetition > 0:  # the first one warms up
                seconds[key].append(elapsed / steps)
    for table in tables:
        table.free()
    beside = {f"{key[0]} {key[2]}": beside_roofs(work, seconds[key], roofs[1:]) for key, work in works.items()}
    return {key: median(values) for key, values in seconds.items()}, beside
