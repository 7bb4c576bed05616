"""The tables at the end of a run."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

STAGES = ("schedule", "propose", "score", "verify", "commit", "outside")


def print_tables(throughput: dict[str, Any]) -> None:
    """Two tables per B: who was how fast, and where our own time went."""
    console = Console(width=150)
    for batch_size, result in throughput.items():
        console.print(_speeds(batch_size, result))
        ratio = result["exact_over_fast"]
        console.print(f"exact / fast, plain: {ratio['median']:.2f} ({ratio['min']:.2f}-{ratio['max']:.2f})")
        console.print(_stages(batch_size, result))


def _speeds(batch_size: str, result: dict[str, Any]) -> Table:
    table = Table(
        title=f"B = {batch_size}: {result['rounds']} rounds, {result['outputs']} outputs each",
        caption="x plain: of the faster of exact and fast, median of the rounds' ratios; ceiling: acceptance length "
        "x t(1 row) / t(K + 1 rows); agreeing: outputs identical to plain exact's",
    )
    table.add_column("contender", no_wrap=True)
    for column in ("tokens/s", "min-max", "x plain", "min-max", "ceiling", "with draft", "K", "acceptance"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("length", "agreeing"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, entry in result["contenders"].items():
        speed, ratio = entry["tokens_per_second"], entry["over_plain"]
        table.add_row(
            name,
            f"{speed['median']:.0f}",
            f"{speed['min']:.0f}-{speed['max']:.0f}",
            f"{ratio['median']:.2f}",
            f"{ratio['min']:.2f}-{ratio['max']:.2f}",
            *(_cell(entry.get(key), ".2f") for key in ("ceiling", "ceiling_with_draft")),
            _cell(entry.get("num_speculative_tokens"), "d"),
            _cell(entry.get("acceptance_rate"), ".1%"),
            _cell(entry.get("mean_acceptance_length"), ".2f"),
            f"{entry['agreeing_outputs']}/{result['outputs']}",
        )
    return table


def _stages(batch_size: str, result: dict[str, Any]) -> Table:
    table = Table(title=f"B = {batch_size}: where our time goes", caption="prefill included")
    table.add_column("contender", no_wrap=True)
    for column in ("steps", "ms/step", *STAGES):
        table.add_column(column, justify="right")
    for name, entry in result["contenders"].items():
        if "stage_shares" in entry:
            shares = (f"{entry['stage_shares'][stage]:.1%}" for stage in STAGES)
            table.add_row(name, str(entry["steps"]), f"{entry['ms_per_step']:.2f}", *shares)
    return table


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
