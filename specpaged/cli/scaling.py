"""`specpaged bench scaling`: laws of what a draft's size and training bring, and the best size on a machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

import specpaged.cli.study_options as options
from specpaged.cli.printing import checked, errors
from specpaged.cli.study_progress import progress_bars

if TYPE_CHECKING:  # torch takes seconds to import: --help does without
    from specpaged.studies.result import Result
    from specpaged.studies.scaling.study import Study

MORE_TO_TRAIN = 3  # the exit status of a command that --minutes has ended
console = Console(width=None if sys.stdout.isatty() else 160)


def scaling(
    work: Annotated[Path, typer.Option(help="Folder of the study, which goes on with what it holds.")],
    stages: Annotated[
        str,
        typer.Option(help="With commas between them; train and acceptance go on where they were, speed begins anew."),
    ] = "train,acceptance,speed,fit",
    drafts: Annotated[
        str | None, typer.Option(help="DIR,DIR,..: drafts of your own, in place of those that are trained.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Target: local path. Default: the embedded one.")] = None,
    sizes: Annotated[
        str, typer.Option(help="WIDTH or WIDTHxLAYERS of drafts to train, with commas between them.")
    ] = "32,64,96,128,192,256",
    checkpoints: Annotated[
        str, typer.Option(help="Tokens of training after which a draft is kept, ascending, with commas between them.")
    ] = "65536,131072,262144,524288,1048576,2097152",
    continuations: Annotated[int, typer.Option(help="That the target writes, to train drafts on.")] = 4096,
    sequence_length: Annotated[int, typer.Option(help="Tokens of a prompt and its continuation.")] = 256,
    batch_size: Annotated[int, typer.Option(help="Sequences of a training step.")] = 8,
    seed: Annotated[int, typer.Option(help="Of continuations, their order and the first weights.")] = 0,
    minutes: Annotated[
        float | None, typer.Option(help="Of training, before the command ends; the same one goes on with it.")
    ] = None,
    hold_out: Annotated[
        str | None, typer.Option(help="The size that is predicted by the others. Default: the last, and largest.")
    ] = None,
    prompts: options.Prompts = None,
    num_prompts: options.NumPrompts = None,
    batch_sizes: options.BatchSizes = "1,8,32",
    num_speculative_tokens: options.K = 5,
    max_tokens: options.MaxTokens = 96,
    rounds: options.Rounds = 3,
    round_seconds: Annotated[float, typer.Option(help="Of timing rounds, for each draft and batch size.")] = 4.0,
    clock: Annotated[
        str, typer.Option(help="'wall', or 'cpu': time in which this process runs, where others share its core.")
    ] = "wall",
    threads: options.Threads = 1,
    out: options.Out = None,
) -> None:
    """Fit laws of acceptance to drafts of several sizes, after several amounts of training, and find the best size.

    Trains drafts for the target on its own continuations, counts the tokens of a round, times rounds, and fits. Every
    second prompt is kept from training, to measure with. On a CPU, greedily.
    """
    arguments = {name: value for name, value in locals().items() if name not in ("batch_sizes", "checkpoints")}
    arguments["batch_sizes"] = checked(options.parse_batch_sizes, batch_sizes)
    arguments["checkpoints"] = checked(options.parse_numbers, "--checkpoints", checkpoints, int)
    study = checked(_prepare, arguments)
    try:
        with progress_bars() as progress:
            result = checked(study.run, progress)
    except KeyboardInterrupt:
        errors.print("stopped: the same command goes on from its last checkpoint")
        raise typer.Exit(130) from None
    if result is not None:
        _finish(result, out)
    elif not study.is_trained:
        errors.print("there is more to train: the same command goes on with it", highlight=False)
        raise typer.Exit(MORE_TO_TRAIN)


def _prepare(arguments: dict[str, Any]) -> Study:
    from specpaged.studies.scaling.options import ScalingOptions

    read = ScalingOptions.read(**arguments)
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # one for every draft that is kept, among ours
    from specpaged.studies.scaling.study import Study

    return Study.prepare(read)


def _finish(result: Result, out: Path | None) -> None:
    from specpaged.studies.scaling.tables import print_notes

    result.print(console)
    print_notes(result, console)
    for path in result.write(out) if out is not None else ():
        console.print(f"[dim]wrote {path.name}[/]", highlight=False)
    print(json.dumps(result.as_dict()))
