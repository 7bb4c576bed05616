"""A study's result: rows of plain data, shown as a table, written as CSV, JSON and plots."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

Row = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """One column of a table: the row's entry, its heading, and how it is written."""

    key: str
    heading: str
    form: str = ""

    def cell(self, row: Row) -> str:
        """The text of the row's entry; empty where the row has none."""
        value = row.get(self.key)
        return "" if value is None else format(value, self.form)


@dataclass
class Result:
    """What a study found. `draw` makes plots of a result in a folder, and returns their files."""

    name: str
    title: str
    columns: Sequence[Column]
    rows: list[Row]
    environment: dict[str, Any]
    settings: dict[str, Any]
    caption: str = ""
    notes: dict[str, Any] = field(default_factory=dict)
    draw: Callable[[Result, Path], list[Path]] | None = None

    def print(self, console: Console) -> None:
        """Print the rows as a table."""
        table = Table(title=self.title, caption=self.caption or None, box=box.SIMPLE_HEAD, pad_edge=False)
        # One pair of models needs no column.
        several = len({row.get("models") for row in self.rows}) > 1
        columns = [column for column in self.columns if several or column.key != "models"]
        for i, column in enumerate(columns):
            table.add_column(column.heading, justify="left" if i == 0 else "right", no_wrap=i == 0)
        for row in self.rows:
            table.add_row(*(column.cell(row) for column in columns))
        console.print(table)

    def as_dict(self) -> dict[str, Any]:
        """The result as plain data, ready for JSON."""
        return {
            "study": self.name,
            "environment": self.environment,
            "settings": self.settings,
            "rows": self.rows,
            **({"notes": self.notes} if self.notes else {}),
        }

    def write(self, out: Path) -> list[Path]:
        """Write CSV, JSON and plots into a folder; returns the files that were written."""
        out.mkdir(parents=True, exist_ok=True)
        written = [out / f"{self.name}.csv", out / f"{self.name}.json"]
        keys = list(dict.fromkeys(key for row in self.rows for key in row))
        with written[0].open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, keys)
            writer.writeheader()
            writer.writerows(self.rows)
        written[1].write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")
        if self.draw is not None:
            written += self.draw(self, out)
        return written


def spread(values: Sequence[float], digits: int = 4) -> dict[str, float]:
    """The values' median, minimum and maximum, by name, rounded to `digits` decimals."""
    return {name: round(of(values), digits) for name, of in (("median", median), ("min", min), ("max", max))}
