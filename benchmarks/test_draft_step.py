"""A draft's one-token pass: the flat decoder against the model's own modules in transformers.

Passes of their own, and as they are in a proposal: several of them in one call, each with what the one before found.
"""

import time
from statistics import median

import pytest

from specpaged.config import EMBEDDED_DRAFT
from specpaged.modeling.loading import load_model
from specpaged.modeling.model_runner import ModelRunner
from specpaged.modeling.ragged_batch import RaggedRow, pack
from specpaged.paging.kv_cache import PagedKVCache

BLOCK_SIZE, CONTEXT_LEN = 16, 160
REPETITIONS = 100
STEPS = 4


@pytest.mark.benchmark(group="a draft step")
@pytest.mark.parametrize("batch_size", [1, 8], ids="B{}".format)
def test_draft_step(benchmark, threads, results, batch_size):
    runners = {}
    width = CONTEXT_LEN // BLOCK_SIZE + 1
    for implementation in ("flat", "transformers"):
        model = load_model(EMBEDDED_DRAFT, numerics="fast", model_impl=implementation, max_model_len=512)
        cache = PagedKVCache(model.kv_spec, batch_size * width, BLOCK_SIZE, model.kv_dtype, model.device)
        for layer in cache.layers:
            layer.zero_()
        runners[implementation] = ModelRunner(model, cache)
    rows = [RaggedRow([7], CONTEXT_LEN, list(range(1 + i * width, 1 + (i + 1) * width)), 1) for i in range(batch_size)]
    batch = pack(rows, BLOCK_SIZE)
    seconds = {(name, steps): [] for name in runners for steps in (1, STEPS)}

    def play():
        for name, steps in seconds:
            start = time.perf_counter()
            runner, vocab_size = runners[name], runners[name].model.vocab_size
            if runner.runs_greedy:
                runner.greedy(rows, vocab_size, [steps - 1] * batch_size, wants_logprobs=True)
            else:
                runner.greedy_steps([batch] * steps, [None] * steps, vocab_size)
            seconds[name, steps].append((time.perf_counter() - start) / steps)

    benchmark.pedantic(play, rounds=REPETITIONS, warmup_rounds=5)
    ms = {key: median(values[5:]) * 1e3 for key, values in seconds.items()}
    results.setdefault("draft_step", {})[f"B = {batch_size}"] = {
        "flat_ms": round(ms["flat", 1], 4),
        "transformers_ms": round(ms["transformers", 1], 4),
        "ratio": round(ms["transformers", 1] / ms["flat", 1], 2),
        "flat_in_proposal_ms": round(ms["flat", STEPS], 4),
        "transformers_in_proposal_ms": round(ms["transformers", STEPS], 4),
        "ratio_in_proposal": round(ms["transformers", STEPS] / ms["flat", STEPS], 2),
    }
