"""How far a study is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from specpaged.cli.printing import errors

Progress = Callable[[str, int], Callable[[int], object]]


@contextmanager
def progress_bars() -> Iterator[Progress]:
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
