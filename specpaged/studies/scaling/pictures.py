"""The study's picture: every law with its points, what was held out, and the best size beside the sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from specpaged.studies.result import Result, Row

MARKERS = "os^vD<>P*X"


def draw(result: Result, path: Path) -> Path:
    """Laws of training, of size, predictions; where rounds were clocked laws of batch size, two, and the optimum."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    num_rows = 2 if "optima" in result.notes else 1
    figure, grid = plt.subplots(num_rows, 3, figsize=(16, 4.5 * num_rows), layout="constrained", squeeze=False)
    rows, laws = result.rows, {law["law"]: law for law in result.notes["laws"]}
    if any(row["tokens"] is not None for row in rows):
        _groups(grid[0][0], rows, laws, "tokens", "size", "training, {}")
    _groups(grid[0][1], rows, laws, "parameters", "tokens", "size, {} tokens" if "both" in laws else "size")
    _predicted(grid[0][2], rows)
    if "optima" in result.notes:
        _batch(grid[1][0], grid[1][1], result.notes["batch"], laws)
        _optima(grid[1][2], result.notes)
    for axes in grid.flat:
        if not axes.has_data():
            axes.set_axis_off()
    environment = result.environment
    on = f"{environment['cpu']}, {environment['threads']} thread(s); target {result.settings['target']}"
    figure.suptitle(f"{result.title}\n{on}", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _groups(axes: Any, rows: list[Row], laws: dict[str, Any], by: str, group: str, name: str) -> None:
    """Points of each group with bars of 95 %, and the group's law through them."""
    values = sorted({row[group] for row in rows}, key=lambda value: (str(type(value)), value if group != "size" else 0))
    if group == "size":
        values = list(dict.fromkeys(row["size"] for row in rows))
    for i, value in enumerate(values):
        points = [row for row in rows if row[group] == value]
        x = [row[by] for row in points]
        y = [row["tokens_per_round"] for row in points]
        bars = [
            [row["tokens_per_round"] - row["low"] for row in points],
            [row["high"] - row["tokens_per_round"] for row in points],
        ]
        label = f"{value:,} tokens" if isinstance(value, int) else str(value)
        axes.errorbar(x, y, yerr=bars, fmt=MARKERS[i % 10], color=f"C{i}", markersize=5, capsize=2, label=label)
        law = laws.get(name.format(value))
        if law is not None:
            line = np.geomspace(min(x), max(x), 20)
            axes.plot(line, _of(law, by, line), color=f"C{i}", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens of training" if by == "tokens" else "parameters of the draft")
    axes.set_ylabel("tokens of a round")
    axes.legend(fontsize=7)


def _of(law: dict[str, Any], term: str, x: np.ndarray) -> np.ndarray:
    coefficients = law["coefficients"]
    return coefficients["1"][0] + coefficients[term][0] * np.log2(x)


def _predicted(axes: Any, rows: list[Row]) -> None:
    for i, role in enumerate(dict.fromkeys(row["role"] for row in rows)):
        points = [row for row in rows if row["role"] == role]
        y = [row["predicted"] for row in points]
        bars = [
            [row["predicted"] - row["predicted_low"] for row in points],
            [row["predicted_high"] - row["predicted"] for row in points],
        ]
        label = "fitted" if role == "fit" else f"held out: {role}"
        x = [row["tokens_per_round"] for row in points]
        axes.errorbar(
            x, y, yerr=bars, fmt=MARKERS[i], color=f"C{i}", markersize=5, capsize=2, elinewidth=0.7, label=label
        )
    ends = [min(row["tokens_per_round"] for row in rows), max(row["tokens_per_round"] for row in rows)]
    axes.plot(ends, ends, color="grey", linestyle="--", linewidth=1)
    axes.set_xlabel("tokens of a round, measured")
    axes.set_ylabel("predicted by the law of those fitted")
    axes.legend(fontsize=8)


def _batch(left: Any, right: Any, rows: list[Row], laws: dict[str, Any]) -> None:
    sizes = [row["B"] for row in rows]
    line = np.geomspace(min(sizes), max(sizes), 20)
    left.plot(sizes, [row["tokens_per_round"] for row in rows], "o", label=f"{rows[0]['size']}, K = {rows[0]['K']}")
    left.set_ylim(1, None)
    left.set_ylabel("tokens of a round")
    for i, name in enumerate(("draft", "plain")):
        middle = [row[f"{name}_speed"]["median"] for row in rows]
        bars = [
            [abs(row[f"{name}_speed"][end] - row[f"{name}_speed"]["median"]) for row in rows] for end in ("min", "max")
        ]
        right.errorbar(sizes, middle, yerr=bars, fmt=MARKERS[i], color=f"C{i}", capsize=2, label=name)
        law = laws.get(f"tokens a second by B, {'with the draft' if name == 'draft' else 'plain'}")
        if law is not None:
            right.plot(line, _of(law, "B", line), color=f"C{i}", linewidth=1)
    law = laws.get("tokens of a round by B")
    if law is not None:
        left.plot(line, _of(law, "B", line), color="C0", linewidth=1)
    right.set_ylabel("tokens a second, prefill included")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, list(map(str, sizes)))
        axes.set_xlabel("B")
        axes.legend(fontsize=8)


def _optima(axes: Any, notes: dict[str, Any]) -> None:
    for i, best in enumerate(notes["optima"]):
        swept = [row for row in notes["sweep"] if row["B"] == best["B"]]
        x = [row["parameters"] for row in swept]
        y = [row["speed"]["median"] for row in swept]
        bars = [[abs(row["speed"][end] - row["speed"]["median"]) for row in swept] for end in ("min", "max")]
        axes.errorbar(x, y, yerr=bars, fmt=MARKERS[i], color=f"C{i}", markersize=5, capsize=2, label=f"B = {best['B']}")
        axes.plot(*zip(*best["curve"], strict=True), color=f"C{i}", linewidth=1)
        axes.plot(best["parameters"][0], best["speed"], "*", color=f"C{i}", markersize=13)
    axes.axhline(1.0, color="grey", linestyle="--", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("parameters of the draft (line: by laws and costs, star: its best)")
    axes.set_ylabel("speed over plain decoding")
    axes.legend(fontsize=8)
