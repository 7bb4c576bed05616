"""What `specpaged plan` shows: a table of ways, and a picture of memory and speed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from specpaged.cli.printing import console
from specpaged.planning.units import human_bytes

if TYPE_CHECKING:
    from specpaged.planning.request import PlanRequest
    from specpaged.planning.way import Way


def print_ways(request: PlanRequest, ways: Sequence[Way]) -> None:
    """A line for each way to decode, beside the best plain one."""
    context = request.planner.context
    plain = max((way.tokens_per_second for way in ways if way.num_drafts == 0), default=0.0)
    table = Table(
        title=f"{human_bytes(request.memory)}, sequences of {context} tokens",
        caption="KV in MiB of a sequence, target + draft, of which idle: for drafts, or slack of last blocks",
    )
    for column in ("way", "K", "fit", "batch", "KV", "idle", "speed"):
        table.add_column(column, justify="left" if column == "way" else "right", no_wrap=True)
    for way in ways:
        known, k = context - way.num_drafts, way.num_drafts
        pools = way.memory.of_target(known, k), way.memory.of_draft(known, k)
        idle = sum(pool.unverified + pool.slack for pool in pools)
        speed = way.tokens_per_second / plain if plain else 0.0
        table.add_row(
            way.name,
            str(k),
            str(way.largest_batch),
            str(way.batch),
            " + ".join(_mebibytes(pool.total) for pool in pools if pool.total),
            _mebibytes(idle),
            f"{speed:.2f}" if way.batch else "-",
        )
    console.print(table)
    of_models = [("target", request.target), *([("draft", request.draft)] if request.draft else [])]
    weights = [f"{role} {human_bytes(model.weight_bytes)}" for role, model in of_models]
    buffers = human_bytes(ways[-1].memory.workspace(ways[-1].batch, ways[-1].num_drafts))
    console.print(f"weights: {', '.join(weights)}; buffers of a pass: {buffers}", highlight=False)


def _mebibytes(num_bytes: float) -> str:
    value = num_bytes / (1 << 20)
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}" if value < 1 else f"{value:.3g}"


def draw(request: PlanRequest, path: Path) -> str:
    """Write a PNG of what each way brings by memory. Returns what to tell the user."""
    try:
        import matplotlib
    except ImportError:
        return "no picture: it needs matplotlib (pip install matplotlib)"
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    memories = request.planner.memories(request.memory)
    ways = [request.planner.ways(memory) for memory in memories]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    gibibytes = [memory / (1 << 30) for memory in memories]
    for i, way in enumerate(ways[0]):
        style = "--" if way.name.startswith("plain") else "-"
        left.plot(gibibytes, [of[i].tokens_per_second for of in ways], style, label=way.name)
        right.plot(gibibytes, [of[i].batch for of in ways], style, label=way.name)
    for axis, label in ((left, "tokens a second, as expected"), (right, "sequences at once")):
        axis.axvline(request.memory / (1 << 30), color="grey", linestyle=":")
        axis.set_xlabel("GiB for weights, KV and buffers")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
    left.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return f"picture: {path.name}"
