"""The engine end to end on a synthetic pair: plain and speculative, by the host's rounds and the device's own.

Every cell decodes the same prompts: with CUDA graphs, without them where that is asked for, and in rounds that the
device runs by itself; plainly, with a fixed K, and with as many drafts as is decided in every step. Seconds are those
of steps in which every sequence decodes. Beside them: what the host needs of them, what the device needs of each stage
(by events; of its own rounds by the profiler), the share of time in which it does nothing (by the profiler), and how
long the bytes of a pass take at the device's measured bandwidth. Events and the profiler have steps of their own, which
are not timed otherwise.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.device.stage_clock import (
    Event,
    Span,
    StageClock,
    TimedCopies,
    device_spans,
    idle_share,
    round_milliseconds,
)
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
    eager_batch_sizes: tuple[int, ...]  # of them, those that run without graphs, too, where there are any
    num_drafts: int
    context_len: int
    steps: int  # timed ones of a cell
    numerics: tuple[str, ...]
    has_rounds: bool  # whether the device can run rounds by itself
    seconds: float  # behind which no cell is begun
    decides: bool = False  # whether there are cells whose K is decided in every step, too


@dataclass(frozen=True)
class Tools:
    """What looks at a device; None where there is none to look at."""

    make_event: Callable[[], Event] | None = None
    wait: Callable[[], None] | None = None
    spans: Callable[[Callable[[], object]], list[Span]] | None = None
    clock: Callable[[], float] = time.perf_counter


FULL = LoopScale(
    "cuda", "bfloat16", "triton", 1, (1, 2, 4, 8, 16, 32, 64), (1, 16), 5, 512, 12, ("exact", "fast"), True, 470.0, True
)  # fmt: skip
SMOKE = LoopScale("cpu", "float32", "auto", 32, (1, 3), (), 2, 40, 4, ("exact", "fast"), False, 470.0, True)
WARM_UP_STEPS, PREFILL_STEPS, LOOKED_AT_STEPS = 6, 10, 4  # the last ones twice, of the host's
LEARNING = 5  # times as many steps, and as many timed ones, where what is decided depends on those before
TARGET, DRAFT, ACCEPTANCE = "Qwen3-8B", "Qwen3-0.6B", 0.8


def tools_of_cuda() -> Tools:
    """Events, and the profiler, of the current CUDA device."""
    return Tools(lambda: torch.cuda.Event(enable_timing=True), torch.cuda.synchronize, device_spans)


def run(scale: LoopScale, bandwidth: float | None, tools: Tools = Tools()) -> dict[str, Any]:
    """All cells, and what they are of. `bandwidth` in bytes/s; None: no floor.

    Cells that were not begun in time are named in "left_out".
    """
    deadline = tools.clock() + scale.seconds
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
        left_out: list[dict[str, Any]] = []
        outputs: dict[tuple[int, str], list[list[list[int]]]] = {}
        for numerics, decides in product(scale.numerics, (False, True)[: 1 + scale.decides]):
            engine = _load(pair, scale, numerics, decides).engine
            for cell in _cells(engine, scale, numerics, ("auto",) if decides else (0, scale.num_drafts)):
                if tools.clock() > deadline:
                    left_out.append(cell)
                    continue
                token_ids, measured = _cell(engine, cell, scale, bandwidth, tools)
                outputs.setdefault((cell["B"], numerics), []).append(token_ids)
                cells.append(cell | measured)
            del engine
            gc.collect()  # its KV is most of a device's memory, and the next one wants as much
            if scale.device == "cuda":
                torch.cuda.empty_cache()
    return {
        "pair": f"synthetic: {TARGET} and {DRAFT}, shapes / {scale.shape_scale}, random weights, "
        f"acceptance {ACCEPTANCE} by construction",
        "dtype": scale.dtype,
        "context_len": scale.context_len,
        "cells": cells,
        "left_out": left_out,
        # Plain and speculative, eager, in graphs and in rounds: of exact numerics they must be.
        "identical": {
            numerics: all(_agree(outputs.get((b, numerics), [])) for b in scale.batch_sizes)
            for numerics in scale.numerics
        },
    }


def _load(pair: SyntheticPair, scale: LoopScale, numerics: str, decides: bool) -> LLM:
    most = max(scale.batch_sizes)
    k = {"max_num_speculative_tokens" if decides else "num_speculative_tokens": scale.num_drafts}
    num_steps = (scale.steps + WARM_UP_STEPS) * (LEARNING if decides else 1) + PREFILL_STEPS + 2 * LOOKED_AT_STEPS
    return LLM(
        pair.target,
        speculative_config={"model": pair.draft, **k},
        device=scale.device,
        numerics=numerics,
        attention_backend=scale.attention_backend,
        max_num_seqs=most,
        max_num_batched_tokens=max(4096, most),
        num_scheduler_steps=1,  # a step is a round
        # While the last prompts of a batch are prefilled, the first ones decode.
        max_model_len=scale.context_len + num_steps * (scale.num_drafts + 1),
        enable_prefix_caching=True,  # each prompt is prefilled once
        device_round=scale.has_rounds,
    )


def _prompts(batch_size: int, scale: LoopScale, vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(vocab_size, (batch_size, scale.context_len), generator=generator).tolist()


def _cells(engine: Engine, scale: LoopScale, numerics: str, ks: Sequence[int | str]) -> Iterator[dict[str, Any]]:
    """The names of an engine's cells, each while it goes the way that the name says."""
    runners = [runner for runner in (engine.target, engine.draft) if runner is not None]
    graphs = [runner.graphs for runner in runners]
    for batch_size in scale.batch_sizes:
        ways = ["graphs"] if graphs[0] else []
        ways += ["eager"] if not ways or (batch_size in scale.eager_batch_sizes and "auto" not in ks) else []
        ways += ["rounds"] if scale.has_rounds else []
        for way in ways:
            for runner, own in zip(runners, graphs, strict=True):
                runner.graphs = None if way == "eager" else own
            if scale.has_rounds:
                engine.keep_on_host(None if way == "rounds" else "timed beside rounds of the device")
            for k in ks:
                yield {"B": batch_size, "numerics": numerics, "way": way, "K": k}


def _cell(
    engine: Engine, cell: Mapping[str, Any], scale: LoopScale, bandwidth: float | None, tools: Tools
) -> tuple[list[list[int]], dict[str, Any]]:
    """What came out of each prompt, and what was measured: medians over the timed steps."""
    k, in_rounds, steps, warm_up_steps = cell["K"], cell["way"] == "rounds", scale.steps, WARM_UP_STEPS
    if k == "auto":
        steps, warm_up_steps = LEARNING * steps, LEARNING * warm_up_steps
    prompts = _prompts(cell["B"], scale, engine.vocabulary.size)
    params = SamplingParams(
        temperature=0.0,
        max_tokens=engine.config.max_model_len - len(prompts[0]),
        ignore_eos=True,
        detokenize=False,
        extra_args=None if k == "auto" else {"num_speculative_tokens": k},
    )
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    sequences = [engine.requests[str(i)].sequences[0] for i in range(len(prompts))]
    while not all(sequence.output_token_ids for sequence in sequences):
        engine.step()
    copies = engine.copies if in_rounds else None
    if in_rounds:
        engine.copies = TimedCopies(copies, tools.clock)
    for _ in range(warm_up_steps):  # compiles and captures what decoding needs
        engine.step()
    before = _num_captured(engine, in_rounds)
    engine.reset_metrics()
    if in_rounds:
        engine.copies.seconds = 0.0
    seconds: list[float] = []
    for _ in range(steps):
        start = tools.clock()
        engine.step()  # its answer comes from the device, or that of the round before: nothing is left to wait for
        seconds.append(tools.clock() - start)
    metrics, of_host = engine.metrics, {}
    if in_rounds:
        of_host = {"host_ms": 1e3 * (sum(seconds) - engine.copies.seconds) / steps}
        engine.copies = copies
    captured = _num_captured(engine, in_rounds) - before
    of_device = {} if tools.make_event is None else _looked_at(engine, in_rounds, tools)
    if bandwidth is not None:
        of_device |= _floors(engine, prompts, 0 if k == "auto" else k, in_rounds, bandwidth)
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
        # Steps of one kind take what their median says, whatever was captured meanwhile; those that differ do not.
        "tokens_per_second": metrics.emitted_tokens / (sum(seconds) if k == "auto" else steps * median),
        "stage_ms": {stage: 1e3 * metrics.seconds[stage] / steps for stage in STAGES},
        **of_host,
        **of_device,
        "captured_meanwhile": captured,  # which a maximum shows
        "acceptance_rate": metrics.acceptance_rate,
        "mean_acceptance_length": metrics.mean_acceptance_length,
    }


def _num_captured(engine: Engine, in_rounds: bool) -> int:
    graphs = [runner.graphs for runner in (engine.target, engine.draft) if runner.graphs is not None]
    return sum(g.num_captured for g in graphs) + (engine.round.num_captured if in_rounds else 0)


def _looked_at(engine: Engine, in_rounds: bool, tools: Tools) -> dict[str, Any]:
    """Some more steps under the profiler, and of the host's some between events."""

    def some_steps() -> None:
        for _ in range(LOOKED_AT_STEPS):
            engine.step()

    spans = [] if tools.spans is None else tools.spans(some_steps)
    if in_rounds:
        return {"device_ms": round_milliseconds(spans), "idle_share": idle_share(spans)}
    stages = StageClock(tools.make_event, tools.wait)
    engine.reset_metrics()
    stages.watch(engine.speculative_step.metrics)
    some_steps()
    engine.reset_metrics()
    return {"device_ms": stages.milliseconds(LOOKED_AT_STEPS), "idle_share": idle_share(spans)}


def _floors(engine: Engine, prompts: list[list[int]], k: int, in_rounds: bool, bandwidth: float) -> dict[str, Any]:
    """Milliseconds of the verify pass, and of the stages that run a model, at the device's bandwidth."""
    of_target, of_draft = (1e3 * _pass_bytes(runner, prompts) / bandwidth for runner in (engine.target, engine.draft))
    target, draft = ("target", "draft") if in_rounds else ("score", "propose")
    return {"floor_ms": of_target, "stage_floor_ms": {target: of_target, draft: k * of_draft}}


def _pass_bytes(runner: ModelRunner, prompts: list[list[int]]) -> int:
    """What any pass over these sequences must read: weights (of the embedding, next to nothing) and KV."""
    config = runner.model.hf_config
    embedding = config.vocab_size * config.hidden_size * runner.model.dtype.itemsize
    kv = sum(map(len, prompts)) * runner.kv_cache.bytes_per_token
    return runner.model.num_parameters * runner.model.dtype.itemsize - embedding + kv


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
            linestyle={"rounds": "-", "graphs": "--"}.get(way, ":"),
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
