"""The studies' pictures. matplotlib is imported when the first is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specpaged.studies.result import Result


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _names(result: Result, key: str = "method") -> list[str]:
    return list(dict.fromkeys(row[key] for row in result.rows))


def _finish(plt: Any, figure: Any, result: Result, path: Path) -> Path:
    environment = result.environment
    models = {row.get("models") for row in result.rows} - {None}
    on = ", ".join([*sorted(models), environment["cpu"], f"{environment['threads']} thread(s)"])
    figure.suptitle(f"{result.title}\n{on}", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _label(result: Result, row: dict[str, Any]) -> str:
    """The method, and the models where there are several pairs."""
    several = len({other.get("models") for other in result.rows}) > 1
    return f"{row['method']}, {row['models']}" if several else row["method"]


def _by_label(result: Result) -> dict[str, list[dict[str, Any]]]:
    by_label: dict[str, list[dict[str, Any]]] = {}
    for row in result.rows:
        by_label.setdefault(_label(result, row), []).append(row)
    return by_label


def bars(result: Result, path: Path, key: str, axis: str) -> Path:
    """One bar for each method and B."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    by_label = _by_label(result)
    sizes = sorted({row["B"] for row in result.rows})
    width = 0.8 / len(by_label)
    for offset, (label, rows) in enumerate(by_label.items()):
        positions = [sizes.index(row["B"]) + (offset - (len(by_label) - 1) / 2) * width for row in rows]
        axes.bar(positions, [row[key] for row in rows], width, label=label)
    axes.set_xticks(range(len(sizes)), [f"B = {size}" for size in sizes])
    axes.set_ylabel(axis)
    figure.legend(fontsize=8, ncols=4, loc="outside lower center")
    return _finish(plt, figure, result, path)


def lines(result: Result, path: Path, key: str, axis: str) -> Path:
    """One line for each method, over B; bars are minimum and maximum."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    for i, (label, rows) in enumerate(_by_label(result).items()):
        low, high = ([abs(row[key] - row[end]) for row in rows] for end in ("min", "max"))
        axes.errorbar(
            [row["B"] for row in rows], [row[key] for row in rows], yerr=[low, high], marker="osv^D<>P*X"[i % 10],
            markersize=4, capsize=2, label=label,
        )  # fmt: skip
    _log_sizes(axes, result)
    axes.set_ylabel(axis)
    axes.set_ylim(bottom=0)
    figure.legend(fontsize=8, ncols=4, loc="outside lower center")
    return _finish(plt, figure, result, path)


def _log_sizes(axes: Any, result: Result) -> None:
    sizes = sorted({row["B"] for row in result.rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("B")


def shares(result: Result, path: Path, keys: tuple[str, ...]) -> Path:
    """Stacked shares of time, one bar for each method and B."""
    plt = _pyplot()
    rows = result.rows
    figure, axes = plt.subplots(figsize=(9, 1.5 + 0.22 * len(rows)), layout="constrained")
    positions = range(len(rows))
    left = [0.0] * len(rows)
    for key in keys:
        axes.barh(positions, [row[key] for row in rows], left=left, label=key)
        left = [before + row[key] for before, row in zip(left, rows, strict=True)]
    axes.set_yticks(positions, [f"{_label(result, row)}, B = {row['B']}" for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("share of time, %")
    figure.legend(fontsize=8, ncols=len(keys), loc="outside lower center")
    return _finish(plt, figure, result, path)


def effects(result: Result, path: Path) -> Path:
    """Ratios, one bar for each effect and B; 1 is no effect."""
    plt = _pyplot()
    sizes = sorted({row["B"] for row in result.rows})
    names = list(dict.fromkeys((row["effect"].strip(), row["with"], row["without"]) for row in result.rows))
    figure, axes = plt.subplots(figsize=(10, 1.5 + 0.18 * len(names) * len(sizes)), layout="constrained")
    height = 0.8 / len(sizes)
    for offset, size in enumerate(sizes):
        rows = [row for row in result.rows if row["B"] == size]
        positions = [
            names.index((row["effect"].strip(), row["with"], row["without"])) + (offset - (len(sizes) - 1) / 2) * height
            for row in rows
        ]
        spans = [[row["median"] - row["min"] for row in rows], [row["max"] - row["median"] for row in rows]]
        axes.barh(
            positions, [row["median"] - 1 for row in rows], height, left=1, xerr=spans, capsize=1, label=f"B = {size}"
        )
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(names)), [f"{effect}\n{a} / {b}" for effect, a, b in names], fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("speed with / speed without")
    figure.legend(fontsize=8, ncols=len(sizes), loc="outside lower center")
    return _finish(plt, figure, result, path)


def grouping(result: Result, path: Path) -> Path:
    """Rates by B, ours and the paper's."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for i, kind in enumerate(_names(result, "prompts")):
        published: dict[int, float] = {}
        for j, (label, rows) in enumerate(_by_label(result).items()):
            of_kind = [row for row in rows if row["prompts"] == kind]
            published |= {row["B"]: row["paper"] for row in of_kind if row["paper"] is not None}
            sizes, rates = [row["B"] for row in of_kind], [row["rate"] for row in of_kind]
            axes.plot(sizes, rates, f"{'os^v'[j % 4]}-", color=f"C{i}", markersize=5, label=f"{kind} prompts, {label}")
        if published:
            axes.plot(
                *zip(*published.items(), strict=True), "x--", color=f"C{i}", alpha=0.6, label=f"{kind} prompts, paper"
            )
    _log_sizes(axes, result)
    axes.set_ylabel("rounds of one length, %")
    figure.legend(fontsize=8, ncols=2, loc="outside lower center")
    return _finish(plt, figure, result, path)


def latencies(result: Result, path: Path) -> Path:
    """P50, P90 and P99 for each method, B and rate."""
    plt = _pyplot()
    rows = result.rows
    figure, axes = plt.subplots(figsize=(9, 1.5 + 0.3 * len(rows)), layout="constrained")
    for key, marker in (("p50", "o"), ("p90", "s"), ("p99", "^")):
        axes.plot([row[key] for row in rows], range(len(rows)), marker, label=key.upper())
    labels = [f"{_label(result, row)}, B = {row['B']}, {row['rate']:g}/s" for row in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("latency, s")
    axes.grid(axis="x", alpha=0.3)
    figure.legend(fontsize=8, ncols=3, loc="outside lower center")
    return _finish(plt, figure, result, path)


def rollback(result: Result, path: Path) -> Path:
    """Time by B, one field for each context and pattern."""
    plt = _pyplot()
    contexts = list(dict.fromkeys(row["context"] for row in result.rows))
    patterns = list(dict.fromkeys(row["pattern"] for row in result.rows))
    figure, grid = plt.subplots(
        len(patterns), len(contexts), figsize=(4 * len(contexts), 3.2 * len(patterns)), sharex=True, sharey=True,
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for i, pattern in enumerate(patterns):
        for j, context in enumerate(contexts):
            axes = grid[i][j]
            for method in _names(result, "arm"):
                rows = [r for r in result.rows if (r["arm"], r["context"], r["pattern"]) == (method, context, pattern)]
                axes.plot([r["B"] for r in rows], [r["us"] for r in rows], "o-", markersize=4, label=method)
            axes.set_yscale("log")
            _log_sizes(axes, result)
            axes.set_title(f"context {context}, {pattern} runs accepted", fontsize=9)
            axes.grid(alpha=0.3)
        grid[i][0].set_ylabel("us a round")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, ncols=6, loc="outside lower center")
    return _finish(plt, figure, result, path)
