"""The options of the studies, and what is read out of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specpaged.cli.printing import checked
from specpaged.config import DTYPES, NUMERICS
from specpaged.studies.method import SCHEDULE_OF, parse_methods

if TYPE_CHECKING:  # torch takes seconds to import: --help does without
    from specpaged.studies.workload import Options

DEFAULT_ARMS = (
    "eqspec/repad,eqspec/gather,eqspec/batch_min,eqspec/truncate,exspec/group,exspec/truncate,continuous/repad,"
    "continuous/truncate"
)

Arms = Annotated[
    str,
    typer.Option(
        help=f"With commas between them: {', '.join(SCHEDULE_OF)}, or SCHEDULE/ROLLBACK, or 'plain'; '/uncached' "
        "behind one: the draft has no KV across rounds; '/ungrouped': exspec does not look for equal lengths; "
        "'/sorted': it keeps its window by length."
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


def read(arguments: dict[str, Any]) -> Options:
    """What a study is to do, out of its command's arguments."""
    from specpaged.studies.workload import EMBEDDED, Options, Pair

    arguments = dict(arguments)
    arguments["methods"] = checked(parse_methods, arguments.pop("arms"))
    arguments["batch_sizes"] = checked(parse_batch_sizes, arguments["batch_sizes"])
    arguments["models"] = [checked(Pair.parse, text) for text in arguments["models"] or [EMBEDDED]]
    return Options(**arguments)


def parse_numbers(name: str, text: str | None, kind: type) -> list[Any]:
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


def parse_batch_sizes(text: str) -> list[int]:
    """At least one positive number. ValueError."""
    sizes = parse_numbers("--batch-sizes", text, int)
    if not sizes:
        raise ValueError(f"--batch-sizes={text!r} names none; allowed: positive numbers with commas between them")
    return sizes
