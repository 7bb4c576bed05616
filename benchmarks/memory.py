"""`python -m benchmarks.memory K [PAIR]`: the peak of resident memory beside its floor, in a process of its own; JSON.
`python -m benchmarks.memory all FILE`: of three pairs, with K = 5 and plainly; a table, a picture and a file of JSON.

And beside what a plan says of it: its `planned` bytes are those of the engine, `share` what was measured over that.
What the process held before, `imports`, is not counted: a toy engine has run in it, so that libraries are loaded.
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.adaptive.pairs import Pair, make_pair
from benchmarks.environment import environment
from specpaged import LLM, SamplingParams
from specpaged.planning.checkpoint_tensors import CheckpointTensors
from specpaged.planning.memory_model import RECORDS, MemoryModel
from specpaged.planning.model_memory import ModelMemory
from specpaged.testing import synthetic_pair

KV_BYTES = 64 << 20
BATCH_SIZE = 32
MAX_MODEL_LEN = 512
PAIRS, KS = ("embedded", "draft 0.4, 0.6", "draft 0.05, 0.6"), (5, 0)
_TOY = 64  # what the shape of the toys is divided by


def status_bytes(name: str) -> int:
    """Of this process: VmRSS now, RssFile of it of mapped files, VmHWM at the peak since `begin_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) * 1024


def begin_peak() -> None:
    """From now on, the peak is that of what comes. What was freed goes back before, so as not to be taken again."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def main(k: int, name: str = "embedded") -> None:
    """Load, make every page of the pools resident, decode two full batches."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        pair = make_pair(name, Path(directory), 2 * BATCH_SIZE)
        _run_toys(k, Path(directory) / "toys")
        print(json.dumps(_measured(pair, k)))


def _run_toys(k: int, directory: Path) -> None:
    toys = synthetic_pair("Qwen3-8B", "Qwen3-0.6B", directory=directory, scale=_TOY, dtype="float32")
    llm = LLM(toys.target, speculative_config=_speculative(toys.draft, k), max_model_len=64, max_num_seqs=2)
    llm.generate([{"prompt_token_ids": [3, 4, 5]}], SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)


def _measured(pair: Pair, k: int) -> dict[str, Any]:
    begin_peak()
    imports, files = status_bytes("VmRSS"), status_bytes("RssFile")
    llm = LLM(
        pair.target,
        speculative_config=_speculative(pair.speculative["model"], k),
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=BATCH_SIZE,
        kv_cache_memory_bytes=KV_BYTES,
    )
    runners = [runner for runner in (llm.engine.target, llm.engine.draft) if runner is not None]
    for runner in runners:
        for layer in runner.kv_cache.layers:
            layer.zero_()
    loaded = status_bytes("VmRSS")
    prompts = [{"prompt_token_ids": list(token_ids)} for token_ids in pair.prompts]
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True), use_tqdm=False)
    floor = sum(runner.model.weight_bytes + runner.kv_cache.num_bytes for runner in runners)
    peak, files = status_bytes("VmHWM"), status_bytes("RssFile") - files
    planned = planned_bytes(pair, k, sum(map(len, pair.prompts[:BATCH_SIZE])))
    measured = peak - imports
    figures = {"imports": imports, "floor": floor, "peak": peak, "rest": measured - floor}
    figures |= {"beside_floor_when_loaded": loaded - imports - floor, "buffers": peak - loaded}
    figures |= {"planned_buffers": planned - floor, "mapped_files": files}
    return figures | {"planned": planned, "share": round(measured / planned, 4)}


def _speculative(draft: str, k: int) -> dict[str, Any]:
    return {"num_speculative_tokens": k} | ({"model": draft} if k else {})


def planned_bytes(pair: Pair, k: int, num_prompt_tokens: int) -> int:
    """What a plan says of such an engine: weights, pools and the buffers of its largest pass."""
    paths = (pair.target, pair.speculative["model"])[: 1 + (k > 0)]
    models = [
        ModelMemory.of(CheckpointTensors.read(path), dtype="float32", max_model_len=MAX_MODEL_LEN) for path in paths
    ]
    model = MemoryModel(*models, max_num_batched_tokens=min(2048, num_prompt_tokens))
    return model.weight_bytes + model.null_blocks + KV_BYTES + model.workspace(BATCH_SIZE, k) + RECORDS


def survey(out: Path) -> None:
    """Every pair and K, each in a process of its own."""
    cells: dict[str, dict[str, Any]] = {}
    for name in PAIRS:
        for k in KS:
            command = [sys.executable, "-m", "benchmarks.memory", str(k), name]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            cells[f"{name}; K = {k}"] = figures = json.loads(done.stdout.splitlines()[-1])
            print(f"{name}, K = {k}: {figures['share']:.3f} of the plan", file=sys.stderr, flush=True)
    results = environment(1) | {"batch_size": BATCH_SIZE, "kv_bytes": KV_BYTES, "cells": cells}
    out.write_text(json.dumps(results, indent=1) + "\n")
    show(cells, out.with_suffix(".png"))
    print(json.dumps(results))


def show(cells: dict[str, dict[str, Any]], picture: Path) -> None:
    """A line for each cell, and bars of what was planned and measured."""
    import matplotlib
    from rich.console import Console
    from rich.table import Table

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    table = Table(title="peak of resident memory, MB", caption="without what libraries hold before an engine is made")
    for column in ("", "weights and KV", "buffers", "planned", "measured", "over the plan"):
        table.add_column(column, justify="right" if column else "left")
    measured = {name: of["peak"] - of["imports"] for name, of in cells.items()}
    for name, of in cells.items():
        parts = (of["floor"], of["buffers"], of["planned"], measured[name])
        table.add_row(name, *(f"{part / 1e6:.1f}" for part in parts), f"{of['share']:.3f}")
    Console(width=110).print(table)
    figure, ax = plt.subplots(figsize=(8, 3.2), layout="constrained")
    for offset, label, values in ((0.2, "planned", [of["planned"] for of in cells.values()]), (-0.2, "measured",
                                  measured.values())):  # fmt: skip
        ax.barh([i + offset for i in range(len(cells))], [value / 1e6 for value in values], 0.38, label=label)
    ax.set_yticks(range(len(cells)), cells)
    ax.set_xlabel("MB")
    ax.legend(fontsize=8)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def command(arguments: list[str]) -> None:
    """What the command line says."""
    if arguments[:1] == ["all"] and len(arguments) == 2:
        survey(Path(arguments[1]))
    elif arguments and arguments[0].isdigit():
        main(int(arguments[0]), *arguments[1:])
    else:
        sys.exit("usage: python -m benchmarks.memory K [PAIR], or python -m benchmarks.memory all FILE")


if __name__ == "__main__":
    command(sys.argv[1:])
