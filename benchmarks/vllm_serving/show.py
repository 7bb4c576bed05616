"""What contenders came to: a row for each at each concurrency, a table of them, and a picture."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

_RATIOS = ("over_vllm", "over_vllm_plain", "over_plain")
Figures = dict[str, Any]  # of a contender's turn
Round = dict[int, dict[str, Figures]]  # by concurrency and contender


def summary(rounds: list[Round], whole: Round) -> list[dict[str, Any]]:
    """A row for each concurrency and contender: medians of the rounds, and of ratios within a round; and the share of
    our steps, of `whole` turns: while a contender is stopped, its stages' clocks go on.
    """
    return [
        _row(level, contender, [of_level[level] for of_level in rounds]) | {"our_steps": of_whole["our_steps"]}
        for level, of_contender in whole.items()
        for contender, of_whole in of_contender.items()
    ]


def _row(level: int, contender: str, rounds: list[dict[str, Figures]]) -> dict[str, Any]:
    runs = [of_contender[contender] for of_contender in rounds]
    row: dict[str, Any] = {"concurrency": level, "contender": contender}
    for name in ("tokens_per_second", "first_token_ms", "between_p50_ms", "between_p99_ms"):
        row[name] = median(run[name] for run in runs)
    row["acceptance"] = runs[0]["acceptance"]
    for name, other in zip(_RATIOS, (f"vllm {contender.split()[1]}", "vllm plain", "ours plain"), strict=True):
        ratios = [
            run["tokens_per_second"] / of_contender[other]["tokens_per_second"]
            for run, of_contender in zip(runs, rounds, strict=True)
            if other in of_contender
        ]
        row[name] = median(ratios) if ratios else None
        row[f"{name}_spread"] = [min(ratios), max(ratios)] if ratios else None
    plain = rounds[0]["ours plain"]["token_ids"]
    row["identical"] = sum(a == b for a, b in zip(runs[0]["token_ids"], plain, strict=True)) / len(plain)
    return row


def print_table(rows: list[dict[str, Any]]) -> None:
    """As a reader compares: by concurrency."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title="vLLM on a CPU: its own worker and ours",
        caption="medians of the rounds, ratios within a round; between: of tokens, those of one chunk share its time; "
        "min-max: of x ours plain; our steps: their share of time, the rest is vLLM's; identical: to ours plain",
    )
    for name in ("at once", "worker", "tokens/s", "x vllm's", "x vllm plain", "x ours plain", "min-max", "first ms",
                 "between P50", "P99 ms", "accepted", "our steps", "identical"):  # fmt: skip
        table.add_column(name, justify="left" if name == "worker" else "right")
    contenders = {row["contender"] for row in rows}
    for i, row in enumerate(rows):
        ratios = ("" if row[name] is None else f"{row[name]:.2f}" for name in _RATIOS)
        accepted, our_steps = ("" if row[name] is None else f"{row[name]:.1%}" for name in ("acceptance", "our_steps"))
        table.add_row(
            str(row["concurrency"]), row["contender"], f"{row['tokens_per_second']:.0f}",
            *ratios, "-".join(f"{ratio:.2f}" for ratio in row["over_plain_spread"]),
            f"{row['first_token_ms']:.1f}", f"{row['between_p50_ms']:.2f}", f"{row['between_p99_ms']:.2f}", accepted,
            our_steps, f"{row['identical']:.0%}", end_section=(i + 1) % len(contenders) == 0,
        )  # fmt: skip
    Console(width=140).print(table)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Speed over our own plain decoding's, by concurrency."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    levels = list(dict.fromkeys(row["concurrency"] for row in rows))
    for offset, contender in enumerate(dict.fromkeys(row["contender"] for row in rows)):
        own = [row for row in rows if row["contender"] == contender]
        places = [i + (offset - 2.5) * 0.13 for i in range(len(levels))]
        ratios, spreads = [row["over_plain"] for row in own], [row["over_plain_spread"] for row in own]
        spans = [[ratio - least for ratio, (least, _) in zip(ratios, spreads, strict=True)],
                 [most - ratio for ratio, (_, most) in zip(ratios, spreads, strict=True)]]  # fmt: skip
        axes.bar(places, ratios, 0.13, yerr=spans, capsize=2, label=contender)
    axes.set_xticks(range(len(levels)), [f"{level} at once" for level in levels])
    axes.set_ylabel("speed over ours, plain")
    axes.legend(fontsize=8, ncols=2)
    figure.savefig(path, dpi=120)
