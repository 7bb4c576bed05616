"""What a figure was measured on, and at which commit."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from specpaged.studies import environment as of_package

ROOT = Path(__file__).parents[1]


def environment(threads: int) -> dict[str, Any]:
    """What the package says of the machine, and the commit."""
    return of_package.environment(threads) | {"commit": commit()}


def commit() -> str | None:
    """The commit of the checkout, with "+" where tracked files differ from it; None outside one."""
    revision = _git("rev-parse", "--short=12", "HEAD")
    if revision is None:
        return None
    return revision + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")


def _git(*arguments: str) -> str | None:
    try:
        return subprocess.check_output(["git", *arguments], cwd=ROOT, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return None
