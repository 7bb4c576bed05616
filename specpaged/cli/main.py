"""The command line: `specpaged generate | verify | tune | plan | train-drafter | bench`."""

from __future__ import annotations

import typer

from specpaged.cli.bench import app as bench
from specpaged.cli.generate import generate
from specpaged.cli.plan import plan
from specpaged.cli.train_drafter import train_drafter
from specpaged.cli.tune import tune
from specpaged.cli.verify import verify

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
app.command()(generate)
app.command()(verify)
app.command()(tune)
app.command()(plan)
app.command("train-drafter")(train_drafter)
app.add_typer(bench, name="bench")
