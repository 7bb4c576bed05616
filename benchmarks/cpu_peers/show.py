"""The peers' speeds, as a table and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer


def print_table(results: dict[str, Any]) -> None:
    """A line for each contender: tokens/s, and in brackets over ours."""
    cells = results["cells"]
    names = list(dict.fromkeys(name for cell in cells.values() for name in cell["over_ours"]))
    width = max(map(len, names))
    typer.echo(" " * width + "".join(f"{cell:>20}" for cell in cells))
    for name in names:
        columns = []
        for cell in cells.values():
            speed = cell["tokens_per_second"].get(name)
            columns.append("-" if speed is None else f"{speed[0]:.0f} ({cell['over_ours'][name]:.2f})")
        typer.echo(f"{name:<{width}}" + "".join(f"{column:>20}" for column in columns))
    for cell, of in cells.items():
        for own, beside in of["over_the_best_peer"].items():
            ratio, least, most = beside["ratio"]
            typer.echo(f"{cell}: {own} is {ratio:.2f} ({least:.2f}-{most:.2f}) of {beside['peer']}")
    for name, reason in results["missing"].items():
        typer.echo(f"{name} is left out: {reason}")
    equal = {name: cell["equal_outputs"] for name, cell in cells.items()}
    for name in names:
        counts = ", ".join(f"{cell} {of[name]}" for cell, of in equal.items() if name in of)
        typer.echo(f"outputs of {name} equal to ours: {counts}")


def draw(results: dict[str, Any], path: Path) -> str:
    """Write a PNG: bars are medians over ours' plain decoding. Returns what to tell the user."""
    try:
        import matplotlib
    except ImportError:
        return "no picture: it needs matplotlib (pip install matplotlib)"
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cells = results["cells"]
    names = list(dict.fromkeys(name for cell in cells.values() for name in cell["over_ours"]))
    width = 0.8 / len(names)
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    for place, name in enumerate(names):
        of = [(i, cell["over_ours"][name]) for i, cell in enumerate(cells.values()) if name in cell["over_ours"]]
        offset = (place - (len(names) - 1) / 2) * width
        axes.bar([i + offset for i, _ in of], [ratio for _, ratio in of], width, label=name)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(cells)), list(cells))
    axes.set_ylabel("tokens/s, over ours, plain")
    figure.legend(fontsize="small", ncols=2, loc="outside lower center")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return f"picture: {path}"
