"""The command line: `specpaged generate | verify | bench`."""

from specpaged.cli.commands import app

__all__ = ["app"]
