"""A draft's one-token pass: the flat decoder against the model's own modules in transformers."""

import time
from statistics import median

import pytest

from specpaged.batch import RaggedRow, pack
from specpaged.config import EMBEDDED_DRAFT
from specpaged.modeling.loading import load_model
from specpaged.modeling.model_runner import ModelRunner
from specpaged.paging.kv_cache import PagedKVCache

BLOCK_SIZE, CONTEXT_LEN = 16, 160
REPETITIONS = 100


@pytest.mark.benchmark(group="a draft step")
@pytest.mark.parametrize("batch_size", [1, 8], ids="B{}".format)
def test_draft_step(benchmark, threads, results, batch_size):
    runners = {}
    width = CONTEXT_LEN // BLOCK_SIZE + 1
    for implementation in ("flat", "transformers"):
        model = load_model(EMBEDDED_DRAFT, numerics="fast", model_impl=implementation, max_model_len=512)
        cache = PagedKVCache(model.kv_spec, batch_size * width, BLOCK_SIZE, model.dtype, model.device)
        for layer in cache.layers:
            layer.zero_()
        runners[implementation] = ModelRunner(model, cache)
    batch = pack(
        [RaggedRow([7], CONTEXT_LEN, list(range(1 + i * width, 1 + (i + 1) * width)), 1) for i in range(batch_size)],
        BLOCK_SIZE,
    )
    seconds = {name: [] for name in runners}

    def play():
        for name, runner in runners.items():
            start = time.perf_counter()
            runner.forward(batch)
            seconds[name].append(time.perf_counter() - start)

    benchmark.pedantic(play, rounds=REPETITIONS, warmup_rounds=5)
    flat, through_modules = (median(seconds[name][5:]) for name in ("flat", "transformers"))
    results.setdefault("draft_step", {})[f"B = {batch_size}"] = {
        "flat_ms": round(flat * 1e3, 4),
        "transformers_ms": round(through_modules * 1e3, 4),
        "ratio": round(through_modules / flat, 2),
    }
