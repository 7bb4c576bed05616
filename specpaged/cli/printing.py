"""What the commands print: on the console, as errors, as JSON."""

from __future__ import annotations

import json
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from specpaged.studies.environment import environment

console = Console()
errors = Console(stderr=True)


def checked(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a step that checks its input: what it refuses ends the command in one sentence and exit status 2."""
    try:
        return function(*args, **kwargs)
    except ValueError as error:
        print_error(str(error))
        raise typer.Exit(2) from None


def print_error(message: str) -> None:
    """One line, however narrow the terminal, and nothing in it taken for markup."""
    errors.print(Text.assemble(("error:", "red"), " ", message), soft_wrap=True)


def rate(value: float | None, form: str) -> str:
    """A metric as text; a dash where nothing was drafted."""
    return "-" if value is None else format(value, form)


def print_json(figures: dict[str, Any]) -> None:
    """One line of JSON: the figures, beside what they were measured on."""
    import torch

    print(json.dumps(environment(torch.get_num_threads()) | figures))
