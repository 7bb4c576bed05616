"""The table and the picture of the cells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.overlap.cell import AGAIN, AUTO, OVERLAP, ROUND_BY_ROUND

SPEEDS = (OVERLAP, AUTO, AGAIN, ROUND_BY_ROUND)
STYLES = {OVERLAP: "tab:red", AUTO: "black", AGAIN: "tab:green", ROUND_BY_ROUND: "tab:gray"}


def print_table(results: dict[str, Any]) -> None:
    """A line for each cell."""
    table = Table(
        title=f"speed over the sequential schedule, {results['threads']} thread(s), K = {results['k']}",
        caption="medians of the rounds' ratios. V, D: of a round of all, on all threads; model: max(V, D) / (V + D), "
        "its time over theirs; halves: the same of two steps of half the batch, by the lanes' passes alone and beside "
        "each other; shared: what a pass takes beside the other lane's, over alone.",
    )
    table.add_column("pair", no_wrap=True)
    columns = ("B", *SPEEDS, "V ms", "D ms", "rest ms", "model", "halves alone", "beside")
    for column in (*columns, "V shared", "D shared", "cost model", "measured"):
        table.add_column(column, justify="right", no_wrap=True)
    for key, cell in results["cells"].items():
        pair, _, batch_size = key.rpartition("; ")
        speeds, passes = cell["speeds"], cell["passes_ms"]
        shared = [passes[f"{name}_beside"] / passes[f"{name}_lane"] for name in ("verify", "draft")]
        cost_model = "" if cell["cost_model"] is None else f"{cell['cost_model']:.2f}"
        table.add_row(
            pair, batch_size, *(f"{speeds[name]:.2f}" if name in speeds else "" for name in SPEEDS),
            *(f"{cell[name]:.2f}" for name in ("verify_ms", "draft_ms", "rest_ms", "model")),
            f"{cell['lanes_alone']:.2f}", f"{cell['lanes_beside']:.2f}", *(f"{ratio:.2f}" for ratio in shared),
            cost_model, f"{speeds[ROUND_BY_ROUND] / speeds[OVERLAP]:.2f}",
        )  # fmt: skip
    console = Console(width=190)
    console.print(table)
    auto = [cell["speeds"][AUTO] for cell in results["cells"].values()]
    console.print(
        f"{len(auto)} cells: auto over sequential >= 0.98 in {sum(x >= 0.98 for x in auto)}, least {min(auto):.3f}"
    )


def draw(results: dict[str, Any], path: Path) -> str:
    """Write a PNG: for every pair speeds by B, and what the models say. Returns what to tell the user."""
    try:
        import matplotlib
    except ImportError:
        return "no picture: it needs matplotlib (pip install matplotlib)"
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    by_pair: dict[str, dict[str, dict[str, Any]]] = {}
    for key, cell in results["cells"].items():
        pair, _, batch_size = key.rpartition("; ")
        by_pair.setdefault(pair, {})[batch_size] = cell
    figure, axes = plt.subplots(
        1, len(by_pair), figsize=(3.6 * len(by_pair), 3.4), layout="constrained", squeeze=False, sharey=True
    )
    for ax, (pair, by_size) in zip(axes.flat, by_pair.items(), strict=True):
        sizes = sorted(by_size, key=int)
        cells = [by_size[size] for size in sizes]
        for name, color in STYLES.items():
            speeds = [c["speeds"].get(name, float("nan")) for c in cells]
            ax.plot(range(len(sizes)), speeds, ".-", color=color, label=name)
        ax.plot(range(len(sizes)), [1 / c["model"] for c in cells], "--", color="tab:blue", label="(V + D) / max(V, D)")
        for kind, style in (("alone", ":"), ("beside", "-.")):
            label = f"two halves on half of the cores, {kind}"
            ax.plot(range(len(sizes)), [1 / c[f"lanes_{kind}"] for c in cells], style, color="tab:orange", label=label)
        ax.axhline(1.0, color="lightgray", linewidth=0.8, zorder=0)
        ax.set_title(pair, fontsize=9)
        ax.set_xticks(range(len(sizes)), sizes, fontsize=8)
        ax.set_xlabel("B", fontsize=8)
    figure.suptitle(
        f"speed over drafts behind the target, by B; {results['cpu']}, {results['threads']} thread(s)", fontsize=10
    )
    figure.legend(*axes.flat[0].get_legend_handles_labels(), fontsize=8, ncols=3, loc="outside lower center")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return f"picture: {path.name}"
