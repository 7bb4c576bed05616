"""Where speculation pays on a named GPU, by what its kernels add up to: a model of it, on any machine.

Bandwidth, flops and the cost of a launch are inputs, said beside every figure. `check` holds the same sums against
passes of this CPU, with this CPU's own constants.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.table import Table

from benchmarks.device.pass_model import (
    MODELS,
    PAIRS,
    Machine,
    Sizes,
    break_even,
    held_bytes,
    kernels_of,
    pass_seconds,
    round_seconds,
    tokens_per_round,
)

WARNING = "a model: sums of bytes, flops and launches by stated inputs. Nothing here was measured on a GPU"
BATCH_SIZES = tuple(2**i for i in range(9))
CONTEXT_LENS = (512, 8000)
KS = tuple(range(9))
ACCEPTANCES = (0.6, 0.7, 0.8, 0.9)
SHOWN_ACCEPTANCE = 0.8  # of the table and the picture
MOST_GPUS = 8


def run(machine: Machine, share: float) -> dict[str, Any]:
    """All cells. `share` of the stated bandwidth and flops is what kernels reach."""
    cells = []
    for target, draft in PAIRS:
        for context_len in CONTEXT_LENS:
            for num_seqs in BATCH_SIZES:
                num_gpus = _num_gpus(machine, target, draft, num_seqs, context_len)
                cells += _cells(machine, share, target, draft, num_seqs, context_len, num_gpus)
    inputs = asdict(machine) | {"share": share, "draft": "on the same GPUs", "talk between GPUs": "not counted"}
    return {"is": WARNING, "inputs": inputs, "cells": cells}


def _num_gpus(machine: Machine, target: str, draft: str, num_seqs: int, context_len: int) -> int | None:
    """The fewest GPUs, a power of two, whose memory holds both models and their KV; None: more than MOST_GPUS."""
    held = sum(held_bytes(MODELS[name], num_seqs, context_len) for name in (target, draft))
    count = 1
    while held > 0.9 * count * machine.memory_bytes:
        count *= 2
    return count if count <= MOST_GPUS else None


def _cells(
    machine: Machine, share: float, target: str, draft: str, num_seqs: int, context_len: int, num_gpus: int | None
) -> list[dict[str, Any]]:
    where = {"target": target, "draft": draft, "B": num_seqs, "context": context_len, "gpus": num_gpus}
    if num_gpus is None:
        return [where | {"K": k, "ms": None} for k in KS]
    shared = machine.shared_by(num_gpus)
    reached = Machine(
        shared.name, share * shared.bytes_per_second, share * shared.flops_per_second, shared.launch_seconds
    )
    models = MODELS[target], MODELS[draft]
    plain = round_seconds(*models, reached, num_seqs, 0, context_len)
    cells = []
    for k in KS:
        seconds = round_seconds(*models, reached, num_seqs, k, context_len)
        speed = {a: tokens_per_round(k, a) * plain / seconds for a in ACCEPTANCES}
        needed = break_even(seconds, plain, k) if k else None
        cells.append(
            where
            | {
                "K": k,
                "ms": round(1e3 * seconds, 4),
                "x_plain": {str(a): round(x, 3) for a, x in speed.items()},
                "break_even": None if needed is None else round(needed, 3),
            }
        )
    return cells


def table(result: dict[str, Any]) -> Table:
    """For each pair, context and B: plain decoding, the best K, and what acceptance it needs."""
    inputs = result["inputs"]
    title = (
        f"{result['is']}: {inputs['name']}, {inputs['share']:.0%} of {inputs['bytes_per_second'] / 1e12:.2f} TB/s and "
        f"{inputs['flops_per_second'] / 1e12:.0f} Tflop/s, {inputs['launch_seconds'] * 1e6:.1f} us a launch"
    )
    shown = Table(title=title, caption=f"x plain at acceptance {SHOWN_ACCEPTANCE}; needs: acceptance at which K pays")
    for column in ("pair", "context", "B", "GPUs", "plain ms", "best K", "round ms", "x plain", "needs", "K 1 needs"):
        shown.add_column(column, justify="right")
    for cells in _by_batch(result["cells"]):
        first = cells[0]
        where = (f"{first['target']} / {first['draft']}", str(first["context"]), str(first["B"]))
        if first["ms"] is None:
            shown.add_row(*where, f"> {MOST_GPUS}", *["-"] * 6)
            continue
        best = max(cells, key=lambda cell: cell["x_plain"][str(SHOWN_ACCEPTANCE)])
        needs = [_shown(cell["break_even"]) if cell["K"] else "-" for cell in (best, cells[1])]
        shown.add_row(
            *where, str(first["gpus"]), f"{first['ms']:.2f}", str(best["K"]), f"{best['ms']:.2f}",
            f"{best['x_plain'][str(SHOWN_ACCEPTANCE)]:.2f}", *needs,
        )  # fmt: skip
    return shown


def _shown(needed: float | None) -> str:
    return "never" if needed is None else f"{needed:.2f}"


def _by_batch(cells: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    return [list(cells[i : i + len(KS)]) for i in range(0, len(cells), len(KS))]


def draw(result: dict[str, Any], path: Path) -> None:
    """A PNG: speed over plain decoding by B, a panel for each pair and context, a line for each K."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(PAIRS), len(CONTEXT_LENS), figsize=(10, 10), layout="constrained", sharex=True)
    colors = plt.get_cmap("viridis")
    for i, (target, draft) in enumerate(PAIRS):
        for j, context_len in enumerate(CONTEXT_LENS):
            panel = axes[i][j]
            for k in KS[1:]:
                cells = [
                    cell for cell in result["cells"]
                    if (cell["target"], cell["context"], cell["K"]) == (target, context_len, k) and cell["ms"]
                ]  # fmt: skip
                speed = [cell["x_plain"][str(SHOWN_ACCEPTANCE)] for cell in cells]
                panel.plot([cell["B"] for cell in cells], speed, marker=".", color=colors(k / KS[-1]), label=f"K = {k}")
            panel.axhline(1.0, color="black", linewidth=0.8)
            panel.set_xscale("log", base=2)
            panel.set_title(f"{target} / {draft}, context {context_len}", fontsize=9)
            panel.set_ylabel("x plain decoding")
            panel.set_xlabel("sequences B")
    axes[0][0].legend(fontsize=7, ncols=2)
    inputs = result["inputs"]
    figure.suptitle(
        f"{inputs['name']}, acceptance {SHOWN_ACCEPTANCE}: {WARNING}\n"
        f"inputs: {inputs['share']:.0%} of {inputs['bytes_per_second'] / 1e12:.2f} TB/s and "
        f"{inputs['flops_per_second'] / 1e12:.0f} Tflop/s, {inputs['launch_seconds'] * 1e6:.1f} us a launch",
        fontsize=9,
    )
    figure.savefig(path, dpi=80)
    plt.close(figure)


def check(batch_sizes: Sequence[int] = (1, 8, 32), repetitions: int = 15, context_len: int = 160) -> dict[str, Any]:
    """The embedded pair's passes on this CPU, beside the same sums with this CPU's constants.

    Constants are what bare loops do beside each pass; a pass is one call, whose cost is not counted, so that sums are
    what a pass cannot be quicker than. Weights are as they are stored, KV and rows in float32.
    """
    from benchmarks.bare_loops import BareLoops
    from benchmarks.ceiling import run_pass
    from specpaged import LLM
    from specpaged.modeling.flat.config import flat_config
    from specpaged.modeling.ragged_batch import RaggedRow

    most = max(batch_sizes)
    llm = LLM(max_num_seqs=most, max_model_len=context_len + 16)
    width = -(-(context_len + 16) // llm.config.block_size)
    entries = []
    for role, runner in (("target", llm.engine.target), ("draft", llm.engine.draft)):
        model = runner.model
        if model.backend != "cpp":
            return {"failed": f"the {role} runs on {model.backend}: {model.not_ours}"}
        for layer in runner.kv_cache.layers:
            layer.zero_()
        config = flat_config(model.hf_config)
        sizes = Sizes(
            weight=_linear_bytes(model) / sum(_linears(config)), kv=model.kv_dtype.itemsize, row=4, splits=False
        )
        loops = BareLoops(_linear_bytes(model), torch.get_num_threads())
        for num_seqs in batch_sizes:
            for query_len in (1, 6) if role == "target" else (1,):
                num_blocks = runner.kv_cache.num_blocks
                blocks = [[1 + (b * width + i) % num_blocks for i in range(width)] for b in range(num_seqs)]
                rows = [RaggedRow([5] * query_len, context_len, own, query_len) for own in blocks]
                measured, ratios = [], []
                for repetition in range(repetitions + 1):
                    roof = loops.measure()
                    run_pass(runner, rows)  # brings back what the loops have driven out of the caches
                    start = time.perf_counter()
                    run_pass(runner, rows)
                    seconds = time.perf_counter() - start
                    machine = Machine("this CPU", roof.bytes_per_second, roof.flops_per_second, 0.0)
                    if repetition:
                        measured.append(seconds)
                        ratios.append(seconds / pass_seconds(config, machine, num_seqs, query_len, context_len, sizes))
                entries.append(
                    {
                        "model": role,
                        "B": num_seqs,
                        "rows": query_len,
                        "measured_ms": round(1e3 * median(measured), 4),
                        "measured_over_model": {"median": round(median(ratios), 3), "min": round(min(ratios), 3)},
                    }
                )
    return {"passes": entries, "threads": torch.get_num_threads(), "context": context_len}


def _linears(config: Any) -> list[float]:
    """Elements of every matrix that a pass multiplies by."""
    names = ("qkv", "o", "gate, up", "down", "output")
    return [kernel.count * kernel.flops / 2 for kernel in kernels_of(config, 1, 1, 0) if kernel.name in names]


def _linear_bytes(model: Any) -> int:
    """The same matrices as they are stored."""
    from benchmarks.roofline import work_of_model

    return work_of_model(model, [0], [1]).weight_bytes
