"""`specpaged train-drafter`: draft heads for a target of the user's own, from its own text."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

import specpaged.cli.options as options
from specpaged.cli.printing import checked, console, print_json
from specpaged.training.heads.arguments import DEFAULT_MINUTES, METHODS, TrainingArguments, default_target

if TYPE_CHECKING:  # torch and transformers take seconds to import: --help does without
    from specpaged.training.heads.run import TrainingRun
    from specpaged.training.heads.trainer import Progress


def train_drafter(
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")],
    data: Annotated[str, typer.Option(help="Prompts: JSON lines in Spec-Bench form, or plain text.")],
    out: Annotated[str, typer.Option(help="Folder for the heads; one that holds such a run goes on with it.")],
    target: Annotated[str | None, typer.Option(help="Local path or hub id. Default: the embedded target.")] = None,
    minutes: Annotated[
        float | None, typer.Option(help=f"Budget of time, all in all. Default: {DEFAULT_MINUTES:g}.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Budget of training steps, in place of minutes.")] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences of a step.")] = 4,
    sequence_length: Annotated[
        int | None,
        typer.Option(help="Tokens of a prompt and its continuation. Default: 512, and 256 of narrow targets."),
    ] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Default: by method and width.")] = None,
    draft_vocab_size: Annotated[
        int | None, typer.Option(help="Tokens that eagle3 drafts among. Default: 32000, or all there are.")
    ] = None,
    continuations: Annotated[
        int | None, typer.Option(help="How many the target writes. Default: as many as a fifth of the minutes allow.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the text, the order and the first weights.")] = 0,
    threads: options.Threads = None,
    device: options.Device = "cpu",
    as_json: options.AsJson = False,
) -> None:
    """Train draft heads for a target on what it writes behind your prompts, and measure how many it would accept.

    Nothing needs to be kept running: started again with the same arguments, it goes on where it was.
    """
    arguments = {name: value for name, value in locals().items() if name not in ("as_json", "target")}
    run = checked(_prepare, default_target(target), arguments)
    try:
        with _shown() as progress:
            figures = checked(run.run, progress)
    except KeyboardInterrupt:
        console.print("stopped: the same command goes on from its last checkpoint")
        raise typer.Exit(130) from None
    console.print(_table(figures))
    if "speed" in figures:  # of a run that ended before it was measured there is none
        console.print(_speed_table(figures["speed"]))
    console.print(f"heads: {out}", highlight=False, markup=False, soft_wrap=True)
    console.print(figures["serve"], highlight=False, markup=False, soft_wrap=True)
    if as_json:
        print_json({name: value for name, value in figures.items() if name != "curve"})


def _prepare(target: str, arguments: dict[str, Any]) -> TrainingRun:
    checked_arguments = TrainingArguments(target=target, **arguments)
    from specpaged.training.heads.run import TrainingRun

    return TrainingRun(checked_arguments)


@contextmanager
def _shown() -> Iterator[Progress]:
    """A bar, and lines above it; lines alone, where nobody would see it move."""
    from specpaged.training.heads.trainer import Progress

    if not sys.stdout.isatty():
        yield Progress(say=lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True))
        return
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Bars(*columns, console=console) as bars:
        task = bars.add_task("continuations", total=1.0)
        yield Progress(
            show=lambda share, line: bars.update(task, completed=share, description=line),
            say=lambda line: bars.console.print(line, highlight=False, markup=False, soft_wrap=True),
        )


def _table(figures: dict[str, Any]) -> Table:
    table = Table(
        title="accepted up to each position",
        caption=f"of greedy drafts at {figures['heads']['starts']} places",
    )
    positions = range(1, 1 + len(figures["heads"]["by_position"]))
    for column in ("", *map(str, positions), "mean length"):
        table.add_column(column, justify="right" if column else "left")
    early = figures["early"]
    for where, of_it in (("", figures), (f", first {early['tokens']} tokens", early)):
        for name, label in (("heads", f"{figures['method']} heads"), ("prompt_lookup", "prompt lookup")):
            shares = (f"{share:.2f}" for share in of_it[name]["by_position"])
            table.add_row(label + where, *shares, f"{of_it[name]['mean_acceptance_length']:.2f}")
    return table


def _speed_table(speed: dict[str, Any]) -> Table:
    from specpaged.training.heads.model_card import speed_rows

    table = Table(
        title="the engine's speed with so many drafts, over plain decoding",
        caption="greedy, behind the held-out prompts, in turn: medians",
    )
    header, *rows = speed_rows(speed)
    for column in header:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    return table
