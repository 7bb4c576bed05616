"""What a figure was measured on: machine and versions, never a host name or a path."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("specpaged", "torch", "transformers", "triton", "numpy")


def environment(threads: int) -> dict[str, Any]:
    """CPU, threads, load and the packages' versions by name, as plain data.

    The load average is that of the moment: where it is well above 0 before a run, the run's figures mean little.
    """
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": threads,
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }


def cpu_model() -> str:
    """The model name of the first CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
