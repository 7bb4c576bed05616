"""What a forward pass costs at a batch: the physical bound of speculation there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

from benchmarks.ours import Ours
from specpaged.modeling.model_runner import ModelRunner
from specpaged.modeling.ragged_batch import RaggedRow, pack
from specpaged.paging.page_table import PageTable

REPETITIONS = 20
DRAFT_STEPS = 4


def forward_seconds(
    contenders: Sequence[Ours], sequences: Sequence[Sequence[int]], context_lens: Sequence[int], num_rows: Sequence[int]
) -> dict[tuple[str, str, int], float]:
    """Median seconds of a pass over all sequences by (numerics, "target" | "draft", rows per sequence).

    Sequence i has KV for its first context_lens[i] tokens, and known tokens behind them for max(num_rows) rows.
    The draft's pass is one of the DRAFT_STEPS of one row that it makes in one call while drafting. All take turns.
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

    seconds: dict[tuple[str, str, int], list[float]] = {key: [] for key in passes}
    for repetition in range(REPETITIONS + 1):
        for key, (runner, rows) in passes.items():
            start = time.perf_counter()
            if not runner.runs_greedy(sum(len(row.token_ids) for row in rows)):
                batch, steps = pack(rows, runner.kv_cache.block_size), DRAFT_STEPS if key[1] == "draft" else 1
                runner.greedy_steps([batch] * steps, [None] * steps, runner.model.vocab_size)
            elif key[1] == "draft":
                runner.greedy(rows, runner.model.vocab_size, [DRAFT_STEPS - 1] * len(rows), wants_logprobs=True)
            else:
                runner.greedy(rows, runner.model.vocab_size)
            elapsed = time.perf_counter() - start
            if repetition > 0:  # the first one warms up
                seconds[key].append(elapsed / (DRAFT_STEPS if key[1] == "draft" else 1))
    for table in tables:
        table.free()
    return {key: median(values) for key, values in seconds.items()}
