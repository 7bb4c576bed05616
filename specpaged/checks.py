"""Checks of arguments: what is wrong is named, with its value and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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


def check_use(name: str, value: Any, is_heeded: bool, by_whom: str) -> None:
    """Raise ValueError where a value is given, one that is not None, and nobody would heed it: it is for `by_whom`."""
    if value is not None and not is_heeded:
        raise ValueError(f"{name}={value!r} is for {by_whom}")


def check_callable(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is callable, or spelt as what can be imported: "package.module:Class"."""
    if isinstance(value, str):
        module, _, attribute = value.partition(":")
        if all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
            return
    elif callable(value):
        return
    raise ValueError(f"{name}={value!r} must be 'package.module:Class', or in Python a class or another callable")


def check_names(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is a mapping whose keys are strings."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{name}={value!r} must be a mapping whose keys are strings")


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


def check_share(name: str, value: Any, most: float) -> None:
    """Raise ValueError unless `value` is a number from 0 to `most`, which may be infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        allowed = "0 or more" if most == math.inf else f"0 to {most:g}"
        raise ValueError(f"{name}={value!r} must be a number; allowed: {allowed}")
