"""`python -m benchmarks.drafters`: every drafter on the embedded target, each by its best fixed K and decided, in turn.

Several that draft together have a + between them. Heads come from folders HEADS/eagle3 and HEADS/clover; those that are
not there are left out. All contenders decode the same prompts in the same rounds, and must have the tokens of plain
decoding. Prints a table, draws a picture where matplotlib is there, and ends in one line of JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

METHODS = ("draft_model", "eagle3", "clover", "suffix", "ngram")
DECIDED = "decided"
ROUNDS = {1: 15, 8: 7, 32: 3}  # by batch size
SHOWN = "draft_model,eagle3,clover,suffix,ngram,suffix+draft_model,suffix+clover,suffix+eagle3"
app = typer.Typer(add_completion=False)


@app.command()
def main(
    heads: Annotated[Path, typer.Option(help="Folder of the folders eagle3 and clover.")] = Path("build/heads"),
    methods: Annotated[str, typer.Option(help="Separated by commas.")] = SHOWN,
    batch_sizes: str = ",".join(map(str, ROUNDS)),
    ks: Annotated[str, typer.Option(help="Fixed K of each drafter, separated by commas.")] = "1,2,4",
    threads: int = 1,
    rounds: Annotated[int | None, typer.Option(help="By default 15 to 3, by batch size.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("build/drafters"),
) -> None:
    """Measure, and show it all."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    import torch

    from benchmarks.adaptive.cell import PLAIN, Engines
    from benchmarks.adaptive.pairs import make_pair
    from benchmarks.environment import environment

    torch.set_num_threads(threads)
    wanted = methods.split(",")
    for method in {part for name in wanted for part in name.split("+")}:
        if method not in METHODS:
            raise typer.BadParameter(f"method {method!r}: {', '.join(METHODS)} are allowed, with + between them")
    drafters = {name: of for name in wanted if (of := _drafter(name.split("+"), heads)) is not None}
    for name in set(wanted) - set(drafters):
        typer.echo(f"{name} is left out: there are no such heads in {heads}", err=True)
    ways: dict[str, dict[str, Any]] = {PLAIN: {"num_speculative_tokens": 0}}
    for method, of in drafters.items():
        ways |= {f"{method}, K = {k}": of | {"num_speculative_tokens": int(k)} for k in ks.split(",")}
        ways[f"{method}, {DECIDED}"] = of | {"num_speculative_tokens": "auto"}
    pair = make_pair("embedded", Path(), 128)
    engines = Engines(pair, ways)
    results = environment(threads) | {"drafters": {}}
    out.mkdir(parents=True, exist_ok=True)
    for size in map(int, batch_sizes.split(",")):
        played = engines.play(size, rounds or ROUNDS.get(size, 5))
        results["drafters"][str(size)] = _summary(played, list(drafters))
        (out / f"drafters-{threads}.json").write_text(json.dumps(results, indent=1) + "\n")
        typer.echo(f"B = {size} is done", err=True)
    _print(results)
    typer.echo(_draw(results, out / f"drafters-{threads}.png"))
    typer.echo(json.dumps(results))


def _drafter(methods: Sequence[str], heads: Path) -> dict[str, Any] | None:
    """A speculative_config's entries; None of heads that are not there."""
    of: dict[str, Any] = {"method": list(methods)}
    if "draft_model" not in methods:
        of["model"] = None
    for method in set(methods) & {"eagle3", "clover"}:
        path = heads / method
        if not (path / "config.json").is_file():
            return None
        of["model"] = str(path)
    return of


def _summary(played: Sequence[Mapping[str, Any]], methods: Sequence[str]) -> dict[str, Any]:
    """Of each way its speed over plain decoding's in the same round, the median, and over the draft model's best fixed
    K, and how its drafts fared; of each method the best fixed K.
    """
    plain = next(iter(played[0]))
    ways: dict[str, dict[str, Any]] = {}
    for name in played[0]:
        ratios = sorted(runs[name].tokens_per_second / runs[plain].tokens_per_second for runs in played)
        metrics = [runs[name].metrics for runs in played]
        drafts, proposed = sum(m.drafts for m in metrics), sum(m.proposed_tokens for m in metrics)
        accepted = sum(m.accepted_tokens for m in metrics)
        proposing = sum(m.seconds["propose"] for m in metrics)
        ways[name] = {
            "tokens_per_second": round(median(runs[name].tokens_per_second for runs in played), 1),
            "over_plain": round(median(ratios), 3),
            "spread": [round(ratios[0], 3), round(ratios[-1], 3)],
            "acceptance_length": round(1 + accepted / drafts, 3) if drafts else None,
            "us_per_proposed_token": round(1e6 * proposing / proposed, 2) if proposed else None,
        }
    best = {
        method: max(
            (name for name in ways if name.startswith(f"{method}, K")), key=lambda name: ways[name]["over_plain"]
        )
        for method in methods
    }
    if "draft_model" in best:
        for name, way in ways.items():
            way["over_draft_model"] = round(_over(played, name, best["draft_model"]), 3)
    return {"rounds": len(played), "ways": ways, "best": best}


def _over(played: Sequence[Mapping[str, Any]], name: str, other: str) -> float:
    """The median of its speed over the other's in the same round."""
    return median(runs[name].tokens_per_second / runs[other].tokens_per_second for runs in played)


def _print(results: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    for size, cell in results["drafters"].items():
        table = Table(
            title=f"B = {size}: {cell['rounds']} rounds, {results['threads']} thread(s)",
            caption="medians; length: mean acceptance length; us: of proposing, for each token that was proposed",
        )
        table.add_column("drafter", no_wrap=True)
        for column in ("tokens/s", "x plain", "min-max", "x draft's best", "length", "us"):
            table.add_column(column, justify="right", no_wrap=True)
        for name, way in cell["ways"].items():
            length, cost = way["acceptance_length"], way["us_per_proposed_token"]
            table.add_row(
                f"[bold]{name}[/]" if name in cell["best"].values() else name,
                f"{way['tokens_per_second']:.0f}",
                f"{way['over_plain']:.2f}",
                "{:.2f}-{:.2f}".format(*way["spread"]),
                f"{way['over_draft_model']:.2f}" if "over_draft_model" in way else "",
                "" if length is None else f"{length:.2f}",
                "" if cost is None else f"{cost:.0f}",
            )
        Console(width=110).print(table)


def _draw(results: dict[str, Any], path: Path) -> str:
    """Write a PNG: each drafter's best and decided speed by B. Returns what to tell the user."""
    try:
        import matplotlib
    except ImportError:
        return "no picture: it needs matplotlib (pip install matplotlib)"
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cells = results["drafters"]
    methods = list(next(iter(cells.values()))["best"])
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    width = 0.8 / (2 * len(methods))
    for i, method in enumerate(methods):
        color = plt.get_cmap("tab10")(i)
        for j in range(2):
            heights = [
                cell["ways"][cell["best"][method] if j == 0 else f"{method}, {DECIDED}"]["over_plain"]
                for cell in cells.values()
            ]
            places = [group + (2 * i + j - len(methods) + 0.5) * width for group in range(len(cells))]
            axes.bar(places, heights, width, color=color, alpha=1.0 if j else 0.5, label=method if j else None)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(cells)), [f"B = {size}" for size in cells])
    axes.set_ylabel("speed over plain decoding")
    axes.set_title(
        f"light: the best fixed K; full: {DECIDED} ({results['cpu']}, {results['threads']} thread(s), fp32, greedy)",
        fontsize=10,
    )
    figure.legend(fontsize=8, ncols=4, loc="outside lower center")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return f"picture: {path.name}"


app()
