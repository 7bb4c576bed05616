"""The engine end to end on a synthetic pair: plain and speculative, eager and in CUDA graphs, exact and fast.

Every cell decodes the same prompts. Seconds are those of steps in which every sequence decodes, split by stage; beside
them stands the time that the verify pass's bytes take at the device's measured bandwidth.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specpaged import LLM, SamplingParams
from specpaged.engine.engine import Engine
from specpaged.metrics import STAGES
from specpaged.modeling.model_runner import ModelRunner
from specpaged.testing import SyntheticPair, synthetic_pair


@dataclass(frozen=True)
class LoopScale:
    """What is run."""

    device: str
    dtype: str
    attention_backend: str
    shape_scale: int  # that the models' shapes are divided by
    batch_sizes: tuple[int, ...]
    num_drafts: int
    context_len: int
    steps: int  # timed ones of a cell
    numerics: tuple[str, ...]


FULL = LoopScale("cuda", "bfloat16", "triton", 1, (1, 2, 4, 8, 16, 32, 64), 5, 512, 12, ("exact", "fast"))
SMOKE = LoopScale("cpu", "float32", "auto", 32, (1, 3), 2, 40, 4, ("exact", "fast"))
WARM_UP_STEPS, PREFILL_STEPS = 6, 10
TARGET, DRAFT, ACCEPTANCE = "Qwen3-8B", "Qwen3-0.6B", 0.8


def run(scale: LoopScale, bandwidth: float | None) -> dict[str, Any]:
    """All cells, and what they are of. `bandwidth` in bytes/s; None: no floor."""
    with tempfile.TemporaryDirectory() as directory:
        pair = synthetic_pair(
            TARGET,
            DRAFT,
            directory=directory,
            acceptance=ACCEPTANCE,
            scale=scale.shape_scale,
            dtype=scale.dtype,
        )
        cells: list[dict[str, Any]] = []
        outputs: dict[tuple[int, str], list[list[list[int]]]] = {}
        for numerics in scale.numerics:
            llm = _load(pair, scale, numerics)
            # "graphs" only where there are any: elsewhere both would be the same.
            ways = ["graphs", "eager"] if llm.engine.target.graphs else ["eager"]
            graphs = [runner.graphs for runner in (llm.engine.target, llm.engine.draft)]
            for batch_size in scale.batch_sizes:
                prompts = _prompts(batch_size, scale, llm.engine.vocabulary.size)
                for way in ways:
                    for runner, own in zip((llm.engine.target, llm.engine.draft), graphs, strict=True):
                        runner.graphs = own if way == "graphs" else None
                    for k in (0, scale.num_drafts):
                        token_ids, cell = _cell(llm.engine, prompts, k, scale.steps)
                        outputs.setdefault((batch_size, numerics), []).append(token_ids)
                        if bandwidth is not None:
                            cell["floor_ms"] = 1e3 * _pass_bytes(llm.engine.target, prompts) / bandwidth
                        cells.append({"B": batch_size, "numerics": numerics, "way": way, "K": k} | cell)
            del llm, graphs
            if scale.device == "cuda":
                torch.cuda.empty_cache()
    return {
        "pair": f"synthetic: {TARGET} and {DRAFT}, shapes / {scale.shape_scale}, random weights, "
        f"acceptance {ACCEPTANCE} by construction",
        "dtype": scale.dtype,
        "context_len": scale.context_len,
        "cells": cells,
        # Plain and speculative, eager and in graphs: of exact numerics they must be.
        "identical": {
            numerics: all(_agree(outputs[b, numerics]) for b in scale.batch_sizes) for numerics in scale.numerics
        },
    }


def _load(pair: SyntheticPair, scale: LoopScale, numerics: str) -> LLM:
    most = max(scale.batch_sizes)
    return LLM(
        pair.target,
        speculative_config={"model": pair.draft, "num_speculative_tokens": scale.num_drafts},
        device=scale.device,
        numerics=numerics,
        attention_backend=scale.attention_backend,
        max_num_seqs=most,
        max_num_batched_tokens=max(4096, most),
        num_scheduler_steps=1,  # a step is a round
        # While the last prompts of a batch are prefilled, the first ones decode.
        max_model_len=scale.context_len + (scale.steps + WARM_UP_STEPS + PREFILL_STEPS) * (scale.num_drafts + 1),
        enable_prefix_caching=True,  # each prompt is prefilled once
    )


def _prompts(batch_size: int, scale: LoopScale, vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(vocab_size, (batch_size, scale.context_len), generator=generator).tolist()


def _cell(engine: Engine, prompts: list[list[int]], k: int, steps: int) -> tuple[list[list[int]], dict[str, Any]]:
    """What came out of each prompt, and the medians over the timed steps."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=engine.config.max_model_len - len(prompts[0]),
        ignore_eos=True,
        detokenize=False,
        extra_args={"num_speculative_tokens": k},
    )
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    sequences = [engine.requests[str(i)].sequences[0] for i in range(len(prompts))]
    while not all(sequence.output_token_ids for sequence in sequences):
        engine.step()
    for _ in range(WARM_UP_STEPS):  # compiles and captures what decoding needs
        engine.step()
    graphs = [runner.graphs for runner in (engine.target, engine.draft) if runner.graphs is not None]
    num_captured = sum(g.num_captured for g in graphs)
    engine.reset_metrics()
    seconds: list[float] = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()  # its answer comes from the device: nothing is left to wait for
        seconds.append(time.perf_counter() - start)
    metrics = engine.metrics
    if any(sequence.is_finished for sequence in sequences):
        raise RuntimeError(f"a sequence ended while {len(prompts)} were timed: max_model_len is too small for the cell")
    token_ids = [list(sequence.output_token_ids) for sequence in sequences]
    for i in range(len(prompts)):
        engine.abort_request(str(i))
    engine.check_integrity()
    median = statistics.median(seconds)
    ordered = sorted(seconds)
    return token_ids, {
        "step_ms": {"median": 1e3 * median, "min": 1e3 * ordered[0], "max": 1e3 * ordered[-1]},
        "tokens_per_second": metrics.emitted_tokens / steps / median,
        "stage_ms": {stage: 1e3 * metrics.seconds[stage] / steps for stage in STAGES},
        "captured_meanwhile": sum(g.num_captured for g in graphs) - num_captured,  # which a maximum shows
        "acceptance_rate": metrics.acceptance_rate,
        "mean_acceptance_length": metrics.mean_acceptance_length,
    }


def _pass_bytes(target: ModelRunner, prompts: list[list[int]]) -> int:
    """What any pass over these sequences must read: weights (of the embedding, next to nothing) and KV."""
    config = target.model.hf_config
    embedding = config.vocab_size * config.hidden_size * target.model.dtype.itemsize
    kv = sum(map(len, prompts)) * target.kv_cache.bytes_per_token
    return target.model.num_parameters * target.model.dtype.itemsize - embedding + kv


def _agree(runs: list[list[list[int]]]) -> bool:
    """Whether all runs say the same of each prompt, as far as each of them came."""
    return all(
        tokens[: len(shortest)] == shortest
        for of_prompt in zip(*runs, strict=True)
        for shortest in [min(of_prompt, key=len)]
        for tokens in of_prompt
    )


def draw(result: dict[str, Any], path: Path) -> None:
    """Tokens per second by B: a line for each numerics, way and K."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    kinds = dict.fromkeys((cell["numerics"], cell["way"], cell["K"]) for cell in result["cells"])
    for numerics, way, k in kinds:
        cells = [c for c in result["cells"] if (c["numerics"], c["way"], c["K"]) == (numerics, way, k)]
        axes.plot(
            [c["B"] for c in cells],
            [c["tokens_per_second"] for c in cells],
            marker="o",
            linestyle="-" if way == "graphs" else "--",
            label=f"{f'speculative, K = {k}' if k else 'plain'}, {numerics}, {way}",
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("sequences B")
    axes.set_ylabel("tokens/s")
    axes.set_title(f"{result['pair']}\n{result['dtype']}, context {result['context_len']}", fontsize=8)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)
