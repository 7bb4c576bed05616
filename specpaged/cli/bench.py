"""The studies' command line: `specpaged bench equivalence | throughput | overhead | grouping | ablation | rollback`.

Each prints a table, writes CSV, JSON and plots if asked to, and ends in one line of JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from specpaged.config import DTYPES, NUMERICS
from specpaged.studies.method import SCHEDULE_OF, parse_methods

if TYPE_CHECKING:  # torch takes seconds to import: --help does without
    from specpaged.studies.result import Result
    from specpaged.studies.workload import Options

app = typer.Typer(no_args_is_help=True, help="Studies of realignment: arms side by side under one engine.")
console = Console(width=None if sys.stdout.isatty() else 160)
errors = Console(stderr=True)

Progress = Callable[[str, int], Callable[[int], object]]
DEFAULT_ARMS = (
    "eqspec/repad,eqspec/gather,eqspec/batch_min,eqspec/truncate,exspec/group,exspec/truncate,continuous/repad,"
    "continuous/truncate"
)

Arms = Annotated[
    str,
    typer.Option(
        help=f"With commas between them: {', '.join(SCHEDULE_OF)}, or SCHEDULE/ARM, or 'plain'; '/uncached' behind "
        "one: the draft has no KV across rounds; '/ungrouped': exspec does not look for equal lengths; '/sorted': it "
        "keeps its window by length."
    ),
]
BatchSizes = Annotated[str, typer.Option(help="With commas between them.")]
Prompts = Annotated[str | None, typer.Option(help="JSON lines in Spec-Bench form; default: the embedded prompts.")]
NumPrompts = Annotated[int | None, typer.Option(min=1, help="An evenly spread selection of the prompts.")]
Models = Annotated[list[str] | None, typer.Option(help="TARGET,DRAFT: local paths or hub ids; may be repeated.")]
Out = Annotated[Path | None, typer.Option(help="A folder for CSV, JSON and plots.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Of each output.")]
K = Annotated[int, typer.Option("--num-speculative-tokens", min=1, help="Draft tokens per round.")]
Window = Annotated[int | None, typer.Option(min=1, help="W of exspec. Default: 48, or half as many again as B.")]
Rounds = Annotated[int, typer.Option(min=1, help="Turns of every method.")]
Threads = Annotated[int, typer.Option(min=1, help="CPU threads of a pass.")]
Device = Annotated[str, typer.Option(help="'cpu' or 'cuda[:index]'.")]
DType = Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")]
Numerics = Annotated[str, typer.Option(help=f"One of {', '.join(NUMERICS)}.")]


@app.command()
def equivalence(
    arms: Arms = DEFAULT_ARMS,
    batch_sizes: BatchSizes = "1,4",
    prompts: Prompts = None,
    num_prompts: NumPrompts = None,
    models: Models = None,
    out: Out = None,
    max_tokens: MaxTokens = 50,
    num_speculative_tokens: K = 5,
    window: Window = None,
    threads: Threads = 1,
    device: Device = "cpu",
    dtype: DType = "auto",
    numerics: Numerics = "exact",
) -> None:
    """Which outputs are those of plain decoding, one prompt at a time."""
    _study("equivalence", _options(locals()))


@app.command()
def throughput(
    arms: Arms = DEFAULT_ARMS,
    batch_sizes: BatchSizes = "1,2,4,8,16,32",
    prompts: Prompts = None,
    num_prompts: NumPrompts = None,
    models: Models = None,
    out: Out = None,
    max_tokens: MaxTokens = 128,
    num_speculative_tokens: K = 5,
    window: Window = None,
    rounds: Rounds = 3,
    threads: Threads = 1,
    device: Device = "cpu",
    dtype: DType = "auto",
    numerics: Numerics = "exact",
    request_rates: Annotated[
        str | None,
        typer.Option(help="Requests a second, with commas: they arrive as a Poisson process; latency is measured."),
    ] = None,
) -> None:
    """Tokens per second by B; with --request-rates, latencies of requests that arrive over time."""
    arguments = dict(locals())
    rates = _checked(_numbers, "--request-rates", arguments.pop("request_rates"), float)
    if rates:
        _study("throughput", _options(arguments), function="run_online", rates=rates)
    else:
        _study("throughput", _options(arguments))


@app.command()
def overhead(
    arms: Arms = DEFAULT_ARMS,
    batch_sizes: BatchSizes = "1,4,16,32",
    prompts: Prompts = None,
    num_prompts: NumPrompts = None,
    models: Models = None,
    out: Out = None,
    max_tokens: MaxTokens = 128,
    num_speculative_tokens: K = 5,
    window: Window = None,
    rounds: Rounds = 3,
    threads: Threads = 1,
    device: Device = "cpu",
    dtype: DType = "auto",
    numerics: Numerics = "exact",
) -> None:
    """Shares of verify, draft, realignment and the rest; bytes of KV copied in a round."""
    _study("overhead", _options(locals()))


@app.command()
def grouping(
    arms: Arms = "exspec/truncate,exspec/truncate/sorted",
    batch_sizes: BatchSizes = "2,4,8,16,32",
    prompts: Prompts = None,
    num_prompts: NumPrompts = None,
    models: Models = None,
    out: Out = None,
    max_tokens: MaxTokens = 128,
    num_speculative_tokens: K = 5,
    window: Window = None,
    threads: Threads = 1,
    device: Device = "cpu",
    dtype: DType = "auto",
    numerics: Numerics = "exact",
) -> None:
    """How often exspec finds B sequences of one length."""
    _study("grouping", _options(locals()))


@app.command()
def ablation(
    batch_sizes: BatchSizes = "4,16",
    prompts: Prompts = None,
    num_prompts: NumPrompts = None,
    models: Models = None,
    out: Out = None,
    max_tokens: MaxTokens = 128,
    num_speculative_tokens: K = 5,
    window: Window = None,
    rounds: Rounds = 3,
    threads: Threads = 1,
    device: Device = "cpu",
    dtype: DType = "auto",
    numerics: Numerics = "exact",
) -> None:
    """Drafter caching, slot refill, grouping and realignment, each by itself."""
    _study("ablation", _options(locals() | {"arms": "plain"}))


@app.command()
def rollback(
    arms: Annotated[str, typer.Option(help=f"With commas between them: {', '.join(SCHEDULE_OF)}.")] = "",
    batch_sizes: BatchSizes = "1,8,32,128",
    context_lens: Annotated[str, typer.Option(help="Tokens of KV before the round, with commas between them.")] = "",
    kv_shape: Annotated[str, typer.Option(help="L,Hkv,D[,dtype] of one model.")] = "8,4,32,float32",
    out: Out = None,
    threads: Threads = 1,
    device: Device = "cpu",
) -> None:
    """What rolling back one round costs, by arm, B and context; no model runs."""
    from specpaged.studies import rollback as study

    names = arms or ",".join(study.available_arms(device))
    result = _checked(
        _with_progress,
        study.run,
        arms=_checked(study.check_arms, names.split(","), device),
        batch_sizes=_checked(_batch_sizes, batch_sizes),
        contexts=_checked(_numbers, "--context-lens", context_lens, int) or study.CONTEXTS,
        shape=_checked(study.KVShape.parse, kv_shape),
        device=device,
        threads=threads,
        out=out,
    )
    _finish(result, out)


def _options(arguments: dict[str, Any]) -> Options:
    from specpaged.studies.workload import EMBEDDED, Options, Pair

    arguments = dict(arguments)
    arguments["methods"] = _checked(parse_methods, arguments.pop("arms"))
    arguments["batch_sizes"] = _checked(_batch_sizes, arguments["batch_sizes"])
    arguments["models"] = [_checked(Pair.parse, text) for text in arguments["models"] or [EMBEDDED]]
    return Options(**arguments)


def _numbers(name: str, text: str | None, kind: type) -> list[Any]:
    """Positive numbers with commas between them; none of None or nothing. ValueError."""
    numbers = []
    for part in (text or "").split(",") if text else ():
        try:
            number = kind(part)
        except ValueError:
            number = 0
        if not 0 < number < float("inf"):
            raise ValueError(f"{name}={text!r} holds {part!r}; allowed: positive numbers with commas between them")
        numbers.append(number)
    return numbers


def _batch_sizes(text: str) -> list[int]:
    sizes = _numbers("--batch-sizes", text, int)
    if not sizes:
        raise ValueError(f"--batch-sizes={text!r} names none; allowed: positive numbers with commas between them")
    return sizes


def _study(name: str, options: Options, function: str = "run", **arguments: Any) -> None:
    from importlib import import_module

    study = getattr(import_module(f"specpaged.studies.{name}"), function)
    _finish(_checked(_with_progress, study, options=options, **arguments), options.out)


def _finish(result: Result, out: Path | None) -> None:
    result.print(console)
    for path in result.write(out) if out is not None else ():
        console.print(f"[dim]wrote {path.name}[/]", highlight=False)
    print(json.dumps(result.as_dict()))


def _with_progress(study: Callable[..., Result], **arguments: Any) -> Result:
    with _bars() as progress:
        return study(progress=progress, **arguments)


@contextmanager
def _bars() -> Iterator[Progress]:
    """A bar for each cell of a study; a line, where nobody would see it move."""
    if not sys.stderr.isatty():

        def announce(label: str, total: int) -> Callable[[int], object]:
            errors.print(f"{label}: {total}", highlight=False)
            return lambda count: None

        yield announce
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors) as bars:

        def progress(label: str, total: int) -> Callable[[int], object]:
            task = bars.add_task(label, total=total)
            return lambda count: bars.advance(task, count)

        yield progress


def _checked(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a step that checks its input: what it refuses ends the command in one sentence and exit status 2."""
    try:
        return function(*args, **kwargs)
    except ValueError as error:
        errors.print(Text.assemble(("error:", "red"), " ", str(error)), soft_wrap=True)
        raise typer.Exit(2) from None
