"""Checks of arguments: what is wrong is named, with its value and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not known; allowed: {', '.join(map(repr, allowed))}")


def check_int(name: str, value: Any, minimum: int) -> None:
    """Raise ValueError unless `value` is an int (no bool) of at least `minimum`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{name}={value!r} must be an int >= {minimum}")


def check_bool(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is True or False: a string would count as true."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False")


def check_ranges(name: str, ranges: Any) -> None:
    """Raise ValueError unless `ranges` is None or ascending [first, last, K] triples that do not overlap."""
    if ranges is None:
        return
    if not isinstance(ranges, Sequence) or isinstance(ranges, str | bytes):
        raise ValueError(f"{name}={ranges!r} must be a list of [first, last, K]")
    last_seen = 0
    for entry in ranges:
        triple = isinstance(entry, Sequence) and len(entry) == 3
        if not triple or not all(isinstance(x, int) and not isinstance(x, bool) for x in entry):
            raise ValueError(f"{name} entry {entry!r} must be three ints [first, last, K]")
        first, last, k = entry
        if not (last_seen < first <= last and k >= 0):
            raise ValueError(
                f"{name} entry {entry!r} must satisfy {last_seen} < first <= last and K >= 0 "
                "(ranges ascend and do not overlap)"
            )
        last_seen = last
