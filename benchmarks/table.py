"""The tables at the end of a run."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

STAGES = ("schedule", "propose", "score", "verify", "commit", "outside")


def print_tables(results: dict[str, Any]) -> None:
    """Three tables per B: who was how fast, where our own time went, and how near our passes are to what they have to
    read and to multiply; then the same of other passes, and what K would have been best.
    """
    console = Console(width=150)
    for batch_size, result in results.get("throughput", {}).items():
        console.print(_speeds(batch_size, result))
        ratio = result["exact_over_fast"]
        console.print(f"exact / fast, plain: {ratio['median']:.2f} ({ratio['min']:.2f}-{ratio['max']:.2f})")
        console.print(_stages(batch_size, result))
        if result["target_passes"]:
            console.print(_roofs(f"B = {batch_size}: target passes, by rows of a sequence", result["target_passes"]))

    for model, passes in results.get("roofline", {}).items():
        console.print(_roofs(f"{model}: passes by rows", passes))
    if "k_sweep" in results:
        console.print(_sweep(results["k_sweep"]))
    for model, entry in results.get("draft_step", {}).items():
        console.print(
            f"draft step, {model}: flat {entry['flat_ms']:.3f} ms, through transformers' modules "
            f"{entry['transformers_ms']:.3f} ms: {entry['ratio']:.1f} x; within a proposal "
            f"{entry['flat_in_proposal_ms']:.3f} and {entry['transformers_in_proposal_ms']:.3f} ms: "
            f"{entry['ratio_in_proposal']:.1f} x"
        )
    for name, entry in results.get("memory", {}).items():
        console.print(
            f"memory, {name}: peak {entry['peak'] / 2**20:.0f} MiB = {entry['imports'] / 2**20:.0f} (imports) + "
            f"{entry['floor'] / 2**20:.0f} (weights and pools) + {entry['rest'] / 2**20:.0f}"
        )


def _sweep(sweep: dict[str, Any]) -> Table:
    table = Table(title="speculative exact / K = 0, by K", caption="one engine, medians of the rounds' ratios")
    ks = next(iter(sweep.values()))["over_plain"]
    for column in ("B", *(f"K = {k}" for k in ks), "best"):
        table.add_column(column, justify="right")
    for batch_size, entry in sweep.items():
        ratios = (f"{ratio['median']:.2f}" for ratio in entry["over_plain"].values())
        table.add_row(batch_size, *ratios, str(entry["best"]))
    return table


def _roofs(title: str, passes: dict[str, Any]) -> Table:
    table = Table(title=title, caption="bytes, flops: what bare loops take for as many, in turn with the passes")
    for column in ("rows", "ms", "MB", "Mflop", "bytes, ms", "flops, ms", "x of the larger", "min-max"):
        table.add_column(column, justify="right", no_wrap=True)
    for rows, entry in passes.items():
        ratio = entry["over_roof"]
        table.add_row(
            rows, f"{entry['ms']:.3f}", f"{entry['megabytes']:.1f}", f"{entry['megaflops']:.1f}",
            f"{entry['ms_of_bytes']:.3f}", f"{entry['ms_of_flops']:.3f}",
            f"{ratio['median']:.2f}", f"{ratio['min']:.2f}-{ratio['max']:.2f}",
        )  # fmt: skip
    return table


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
    table = Table(
        title=f"B = {batch_size}: where our time goes",
        caption="prefill included; not forward: all time outside of the models' passes, and us by sequence and step",
    )
    table.add_column("contender", no_wrap=True)
    for column in ("steps", "ms/step", *STAGES, "not forward", "us/seq/step"):
        table.add_column(column, justify="right")
    for name, entry in result["contenders"].items():
        if "stage_shares" in entry:
            shares = (f"{entry['stage_shares'][stage]:.1%}" for stage in STAGES)
            outside = entry["outside_forwards"]
            table.add_row(
                name, str(entry["steps"]), f"{entry['ms_per_step']:.2f}", *shares,
                f"{outside['share']:.1%}", f"{outside['us_per_sequence_and_step']:.1f}",
            )  # fmt: skip
    return table


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
