"""The studies' command line: `specpaged bench equivalence | throughput | overhead | grouping | ablation | rollback |
scaling`.

Each prints a table, writes CSV, JSON and plots if asked to, and ends in one line of JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

import specpaged.cli.study_options as options
from specpaged.cli.printing import checked
from specpaged.cli.scaling import scaling
from specpaged.cli.study_progress import progress_bars
from specpaged.studies.method import SCHEDULE_OF

if TYPE_CHECKING:  # torch takes seconds to import: --help does without
    from specpaged.studies.result import Result
    from specpaged.studies.workload import Options

app = typer.Typer(
    no_args_is_help=True,
    help="Studies: ways to roll back drafts, side by side under one engine; and what a draft's size brings.",
)
app.command()(scaling)
console = Console(width=None if sys.stdout.isatty() else 160)


@app.command()
def equivalence(
    arms: options.Arms = options.DEFAULT_ARMS,
    batch_sizes: options.BatchSizes = "1,4",
    prompts: options.Prompts = None,
    num_prompts: options.NumPrompts = None,
    models: options.Models = None,
    out: options.Out = None,
    max_tokens: options.MaxTokens = 50,
    num_speculative_tokens: options.K = 5,
    window: options.Window = None,
    threads: options.Threads = 1,
    device: options.Device = "cpu",
    dtype: options.DType = "auto",
    numerics: options.Numerics = "exact",
) -> None:
    """Which outputs are those of plain decoding, one prompt at a time."""
    _study("equivalence", options.read(locals()))


@app.command()
def throughput(
    arms: options.Arms = options.DEFAULT_ARMS,
    batch_sizes: options.BatchSizes = "1,2,4,8,16,32",
    prompts: options.Prompts = None,
    num_prompts: options.NumPrompts = None,
    models: options.Models = None,
    out: options.Out = None,
    max_tokens: options.MaxTokens = 128,
    num_speculative_tokens: options.K = 5,
    window: options.Window = None,
    rounds: options.Rounds = 3,
    threads: options.Threads = 1,
    device: options.Device = "cpu",
    dtype: options.DType = "auto",
    numerics: options.Numerics = "exact",
    request_rates: Annotated[
        str | None,
        typer.Option(help="Requests a second, with commas: they arrive as a Poisson process; latency is measured."),
    ] = None,
) -> None:
    """Tokens per second by B; with --request-rates, latencies of requests that arrive over time."""
    arguments = dict(locals())
    rates = checked(options.parse_numbers, "--request-rates", arguments.pop("request_rates"), float)
    if rates:
        _study("throughput", options.read(arguments), function="run_online", rates=rates)
    else:
        _study("throughput", options.read(arguments))


@app.command()
def overhead(
    arms: options.Arms = options.DEFAULT_ARMS,
    batch_sizes: options.BatchSizes = "1,4,16,32",
    prompts: options.Prompts = None,
    num_prompts: options.NumPrompts = None,
    models: options.Models = None,
    out: options.Out = None,
    max_tokens: options.MaxTokens = 128,
    num_speculative_tokens: options.K = 5,
    window: options.Window = None,
    rounds: options.Rounds = 3,
    threads: options.Threads = 1,
    device: options.Device = "cpu",
    dtype: options.DType = "auto",
    numerics: options.Numerics = "exact",
) -> None:
    """Shares of verify, draft, realignment and the rest; bytes of KV copied in a round."""
    _study("overhead", options.read(locals()))


@app.command()
def grouping(
    arms: options.Arms = "exspec/truncate,exspec/truncate/sorted",
    batch_sizes: options.BatchSizes = "2,4,8,16,32",
    prompts: options.Prompts = None,
    num_prompts: options.NumPrompts = None,
    models: options.Models = None,
    out: options.Out = None,
    max_tokens: options.MaxTokens = 128,
    num_speculative_tokens: options.K = 5,
    window: options.Window = None,
    threads: options.Threads = 1,
    device: options.Device = "cpu",
    dtype: options.DType = "auto",
    numerics: options.Numerics = "exact",
) -> None:
    """How often exspec finds B sequences of one length."""
    _study("grouping", options.read(locals()))


@app.command()
def ablation(
    batch_sizes: options.BatchSizes = "4,16",
    prompts: options.Prompts = None,
    num_prompts: options.NumPrompts = None,
    models: options.Models = None,
    out: options.Out = None,
    max_tokens: options.MaxTokens = 128,
    num_speculative_tokens: options.K = 5,
    window: options.Window = None,
    rounds: options.Rounds = 3,
    threads: options.Threads = 1,
    device: options.Device = "cpu",
    dtype: options.DType = "auto",
    numerics: options.Numerics = "exact",
) -> None:
    """Drafter caching, slot refill, grouping and realignment, each by itself."""
    _study("ablation", options.read(locals() | {"arms": "plain"}))


@app.command()
def rollback(
    arms: Annotated[str, typer.Option(help=f"With commas between them: {', '.join(SCHEDULE_OF)}.")] = "",
    batch_sizes: options.BatchSizes = "1,8,32,128",
    context_lens: Annotated[str, typer.Option(help="Tokens of KV before the round, with commas between them.")] = "",
    kv_shape: Annotated[str, typer.Option(help="L,Hkv,D[,dtype] of one model.")] = "8,4,32,float32",
    out: options.Out = None,
    threads: options.Threads = 1,
    device: options.Device = "cpu",
) -> None:
    """What rolling back one round costs, by method, B and context; no model runs."""
    from specpaged.studies import rollback as study

    names = arms or ",".join(study.available_rollbacks(device))
    result = checked(
        _with_progress,
        study.run,
        rollbacks=checked(study.check_rollbacks, names.split(","), device),
        batch_sizes=checked(options.parse_batch_sizes, batch_sizes),
        contexts=checked(options.parse_numbers, "--context-lens", context_lens, int) or study.CONTEXTS,
        shape=checked(study.KVShape.parse, kv_shape),
        device=device,
        threads=threads,
        out=out,
    )
    _finish(result, out)


def _study(name: str, study_options: Options, function: str = "run", **arguments: Any) -> None:
    from importlib import import_module

    study = getattr(import_module(f"specpaged.studies.{name}"), function)
    _finish(checked(_with_progress, study, options=study_options, **arguments), study_options.out)


def _finish(result: Result, out: Path | None) -> None:
    result.print(console)
    for path in result.write(out) if out is not None else ():
        console.print(f"[dim]wrote {path.name}[/]", highlight=False)
    print(json.dumps(result.as_dict()))


def _with_progress(study: Callable[..., Result], **arguments: Any) -> Result:
    with progress_bars() as progress:
        return study(progress=progress, **arguments)
