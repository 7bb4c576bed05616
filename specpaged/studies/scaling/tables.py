"""The study's tables: drafts, laws, what was held out, batches, and the best size beside a sweep."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from specpaged.studies.result import Column, Result

COLUMNS = (
    Column("size", "draft"),
    Column("parameters", "parameters", ",d"),
    Column("tokens", "tokens", ",d"),
    Column("role", "held out by"),
    Column("tokens_per_round", "a round", ".3f"),
    Column("low", "95 %", ".3f"),
    Column("high", "", ".3f"),
    Column("predicted", "predicted", ".3f"),
    Column("predicted_low", "95 %", ".3f"),
    Column("predicted_high", "", ".3f"),
    Column("error", "error %", "+.1f"),
)


def print_notes(result: Result, console: Console) -> None:
    """All tables but the result's own."""
    notes = result.notes
    _print_laws(notes["laws"], console)
    _print_held_out(notes["held_out"], console)
    if "sweep" in notes:
        _print_sweep(notes, console)


def _table(title: str, caption: str, *columns: str) -> Table:
    table = Table(title=title, caption=caption or None, box=box.SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=i == 0)
    return table


def _print_laws(laws: list[dict[str, Any]], console: Console) -> None:
    table = _table(
        "log-linear laws", "coefficients: the gain with each doubling", "law of", "per doubling of", "c", "95 %", "",
        "R^2", "points",
    )  # fmt: skip
    for law in laws:
        for i, (term, (value, low, high)) in enumerate(law["coefficients"].items()):
            if term != "1":
                first = (f"{law['r_squared']:.3f}", str(law["points"])) if i == 1 else ("", "")
                numbers = (f"{x:+.4g}" for x in (value, low, high))
                table.add_row(law["law"] if i == 1 else "", term, *numbers, *first)
    console.print(table)


def _print_held_out(held_out: dict[str, dict[str, Any]], console: Console) -> None:
    table = _table(
        "what a law of the others says of drafts held out", "errors relative, in percent; within: of the law's 95 %",
        "law of", "R^2", "held out by", "mean", "largest", "within",
    )  # fmt: skip
    for name, of_law in held_out.items():
        for i, role in enumerate(role for role in ("fit", "size", "training", "both") if role in of_law):
            errors = of_law[role]
            first = (name, f"{of_law['r_squared']:.3f}") if i == 0 else ("", "")
            within = f"{errors['within']}/{errors['drafts']}"
            shown = "(fitted)" if role == "fit" else role
            table.add_row(*first, shown, f"{errors['mean_error']:.1f}", f"{errors['largest_error']:.1f}", within)
    console.print(table)


def _print_sweep(notes: dict[str, Any], console: Console) -> None:
    table = _table(
        "speed over plain decoding, each size at the K that promises most", "best: by laws and costs, over all sizes",
        "B", "draft", "parameters", "K", "measured", "min", "max", "promised",
    )  # fmt: skip
    for best in notes["optima"]:
        for row in (row for row in notes["sweep"] if row["B"] == best["B"]):
            speeds = (f"{row['speed'][name]:.3f}" for name in ("median", "min", "max"))
            numbers = (f"{row['parameters']:,}", str(row["K"]), *speeds, f"{row['promised']:.3f}")
            table.add_row(str(row["B"]), row["size"], *numbers)
        value, low, high = best["parameters"]
        between = f"{value:,} ({low:,}-{high:,})"
        table.add_row(str(best["B"]), "best", between, str(best["K"]), "", "", "", f"{best['speed']:.3f}")
    console.print(table)
