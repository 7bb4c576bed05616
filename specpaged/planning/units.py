"""Numbers of bytes as people write and read them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def parse_bytes(name: str, value: str) -> int:
    """'6GiB', '800MB', '1.5 GB' or '4096' as bytes. ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
    unit = None if match is None else _UNITS.get(match[2].upper())
    if unit is None or float(match[1]) * unit < 1:
        raise ValueError(f"{name}={value!r} must be a number of bytes; allowed: 6GiB, 800MB, 8589934592")
    return int(float(match[1]) * unit)


def human_bytes(num_bytes: float) -> str:
    """1536 -> '1.5 KiB'."""
    units = ("B", "KiB", "MiB", "GiB")
    power = min(len(units) - 1, max(0, (int(num_bytes).bit_length() - 1) // 10))
    return f"{num_bytes:.0f} B" if power == 0 else f"{num_bytes / (1 << 10 * power):.2f} {units[power]}"
