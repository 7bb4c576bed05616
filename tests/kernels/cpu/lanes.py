"""A kernel that is built with as many lanes as the library of this processor does not have."""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

import pytest

from specpaged_kernels.cpu import build
from specpaged_kernels.cpu.library import SOURCE

# A fifth of the time. What a kernel says is what every build of it computes: see build.py.
QUICK_FLAGS = tuple("-O1" if flag == "-O3" else flag for flag in build.FLAGS)


def other_lanes() -> int:
    """16 where the library has 8, and the other way round: vectors.h asks the same macro."""
    macros = build._run(build.compiler(), ["-dM", "-E", "-x", "c++", os.devnull], "does not run")
    return 8 if "__AVX512F__" in macros else 16


def load_with_other_lanes(folder: Path, kernel: str, before: str = "", behind: str = "") -> ctypes.CDLL:
    """`kernel`.cpp alone, between lines of C++. What it is held against is the library that everybody uses."""
    for path in [SOURCE.with_name(f"{kernel}.cpp"), *SOURCE.parent.glob("*.h")]:
        shutil.copy(path, folder)
    source = folder / f"{kernel}_of_other_lanes.cpp"
    source.write_text(f'{before}#define WIDE_LANES {other_lanes()}\n#include "{kernel}.cpp"\n{behind}')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(build.CACHE, str(folder / "built"))
        patch.setattr(build, "FLAGS", QUICK_FLAGS)
        return build.load(source)
