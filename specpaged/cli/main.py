"""The command line: `specpaged generate | verify | tune | bench`."""

from __future__ import annotations

import typer

from specpaged.cli.bench import app as bench
from specpaged.cli.generate import generate
from specpaged.cli.tune import tune
from specpaged.cli.verify import verify

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
app.command()(generate)
app.command()(verify)
app.command()(tune)
app.add_typer(bench, name="bench")
