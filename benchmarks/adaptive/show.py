"""The table and the picture of the cells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def print_table(results: dict[str, Any]) -> None:
    """A line for each cell; then how many of them are as good as they should be."""
    cells = results["cells"]
    names = list(dict.fromkeys(name for cell in cells.values() for name in cell["over_plain"]))[1:]
    table = Table(
        title=f"speed over plain decoding, {results['threads']} thread(s)",
        caption="medians of the rounds' ratios; +-: the standard deviation of the last one; over best: of whoever else "
        "is best in the cell; verified: draft tokens for each token of output; P99: of requests' seconds, over plain "
        "decoding's",
    )
    table.add_column("pair", no_wrap=True)
    for column in ("B", *names, "+-", "over best", "P99", "best's", "verified", "accepted", "deciding"):
        table.add_column(column, justify="right", no_wrap=True)
    for key, cell in cells.items():
        pair, _, batch_size = key.rpartition("; ")
        ratios = [f"{cell['over_plain'][name]:.2f}" if name in cell["over_plain"] else "" for name in names]
        accepted = "" if cell["acceptance"] is None else f"{cell['acceptance']:.0%}"
        p99 = [f"{cell['p99'][name]:.2f}" for name in ("adaptive", cell["best"])]
        verified, deciding = f"{cell['verified_per_token']:.2f}", f"{cell['deciding']:.1%}"
        error = cell.get("error", {}).get("adaptive")
        error = "" if error is None else f"{error:.3f}"
        last = (error, f"{cell['over_best']:.2f}", *p99, verified, accepted, deciding)
        table.add_row(pair, batch_size, *ratios, *last)
    console = Console(width=170)
    console.print(table)
    over_plain = [cell["over_plain"]["adaptive"] for cell in cells.values()]
    over_best = [cell["over_best"] for cell in cells.values()]
    console.print(
        f"{len(cells)} cells: over plain >= 0.98 in {sum(x >= 0.98 for x in over_plain)}, least {min(over_plain):.3f}; "
        f"over best >= 0.95 in {sum(x >= 0.95 for x in over_best)}, least {min(over_best):.3f}"
    )


def draw(results: dict[str, Any], path: Path) -> str:
    """Write a PNG: for every pair its speeds by B. Returns what to tell the user."""
    try:
        import matplotlib
    except ImportError:
        return "no picture: it needs matplotlib (pip install matplotlib)"
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    by_pair: dict[str, dict[str, dict[str, float]]] = {}
    for key, cell in results["cells"].items():
        pair, _, batch_size = key.rpartition("; ")
        by_pair.setdefault(pair, {})[batch_size] = cell["over_plain"]
    num_columns = min(4, len(by_pair))
    num_rows = -(-len(by_pair) // num_columns)
    figure, axes = plt.subplots(
        num_rows, num_columns, figsize=(3.2 * num_columns, 2.6 * num_rows), layout="constrained", squeeze=False
    )
    for ax in axes.flat[len(by_pair) :]:
        ax.set_axis_off()
    for ax, (pair, by_size) in zip(axes.flat, by_pair.items(), strict=False):
        sizes = list(by_size)
        for i, name in enumerate(next(iter(by_size.values()))):
            is_adaptive = name == "adaptive"
            ax.plot(
                range(len(sizes)),
                [by_size[size][name] for size in sizes],
                label=name,
                color="black" if is_adaptive else plt.get_cmap("viridis")(i / 6),
                linewidth=2.2 if is_adaptive else 1.0,
                linestyle="--" if name == "plain" else "-",
                marker=".",  # of a pair with one B there is no line
            )
        ax.set_title(pair, fontsize=9)
        ax.set_xticks(range(len(sizes)), sizes, fontsize=8)
    figure.suptitle(f"speed over plain decoding by B; {results['cpu']}, {results['threads']} thread(s)", fontsize=10)
    figure.legend(*axes.flat[0].get_legend_handles_labels(), fontsize=8, ncols=8, loc="outside lower center")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return f"picture: {path.name}"
