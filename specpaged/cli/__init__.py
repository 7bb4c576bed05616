"""The command line: `specpaged generate | verify | bench`."""

from specpaged.cli.main import app

__all__ = ["app"]
