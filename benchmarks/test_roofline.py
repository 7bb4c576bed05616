"""Passes of a target beside what reading and multiplying alone would take, in turn with the loops that do so.

A pass of 1 row is of one sequence; of more rows, they are 8 sequences', each with as many of them.
"""

from functools import partial

import pytest

from benchmarks.bare_loops import BareLoops
from benchmarks.ceiling import run_pass, seconds_of
from benchmarks.roofline import beside_roofs, work_of_model
from specpaged.config import EMBEDDED_TARGET
from specpaged.modeling.loading import load_model
from specpaged.modeling.model_runner import ModelRunner
from specpaged.modeling.ragged_batch import RaggedRow
from specpaged.paging.kv_cache import PagedKVCache
from specpaged.testing import synthetic_pair

NUM_ROWS, NUM_SEQS = (1, 8, 16, 24, 48), 8
CONTEXT_LEN, BLOCK_SIZE = 64, 16
ROUNDS = 15


@pytest.fixture(params=["embedded", "8B / 4, bfloat16", "8B / 4, float32"])
def target(request, tmp_path):
    """What the results call a model, and its runner."""
    path = EMBEDDED_TARGET
    if request.param != "embedded":
        dtype = request.param.rpartition(" ")[2]
        path = synthetic_pair("Qwen3-8B", "Qwen3-0.6B", directory=tmp_path, scale=4, dtype=dtype).target
    model = load_model(path, dtype="float32", max_model_len=512)
    width = (CONTEXT_LEN + max(NUM_ROWS)) // BLOCK_SIZE
    cache = PagedKVCache(model.kv_spec, NUM_SEQS * width, BLOCK_SIZE, model.kv_dtype, model.device)
    for layer in cache.layers:
        layer.zero_()
    return request.param, ModelRunner(model, cache)


@pytest.mark.benchmark(group="passes beside their roofs")
def test_roofline(benchmark, threads, results, pytestconfig, target):
    name, runner = target
    passes, works = {}, {}
    for num_rows in NUM_ROWS:
        num_seqs = 1 if num_rows == 1 else NUM_SEQS
        query_len = num_rows // num_seqs
        width = runner.kv_cache.num_blocks // NUM_SEQS
        passes[num_rows] = [
            RaggedRow([7] * query_len, CONTEXT_LEN, range(1 + i * width, 1 + (i + 1) * width), query_len)
            for i in range(num_seqs)
        ]
        works[num_rows] = work_of_model(runner.model, [CONTEXT_LEN] * num_seqs, [query_len] * num_seqs)
    loops = BareLoops(works[1].num_bytes, threads)
    seconds, roofs = {num_rows: [] for num_rows in NUM_ROWS}, {num_rows: [] for num_rows in NUM_ROWS}

    def play():
        for num_rows, rows in passes.items():
            roofs[num_rows].append(loops.measure())
            seconds[num_rows].append(seconds_of(partial(run_pass, runner, rows)))

    benchmark.pedantic(play, rounds=pytestconfig.getoption("--rounds") or ROUNDS, warmup_rounds=1)
    results.setdefault("roofline", {})[name] = {
        str(num_rows): beside_roofs(works[num_rows], seconds[num_rows][1:], roofs[num_rows][1:])
        for num_rows in NUM_ROWS
    }
