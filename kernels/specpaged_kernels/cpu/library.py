"""The library of all C++ kernels, and where it can be had."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from specpaged_kernels.cpu.build import BuildError, load

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
SOURCE = Path(__file__).with_name("decoder.cpp")  # which includes the others

POINTER, SIZE, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


@functools.cache
def why_not(dtype: torch.dtype) -> str | None:
    """Why the kernels cannot run here in this dtype; None if they can."""
    if dtype not in DTYPES:
        return f"{dtype} is not one of {', '.join(map(str, DTYPES))}"
    try:
        load(SOURCE)
    except BuildError as error:
        return str(error)
    return None


def functions(name: str, argument_types: Sequence[type], result_type: type | None = None) -> dict[torch.dtype, object]:
    """The kernel in each dtype. Raises BuildError."""
    found = {}
    for dtype, suffix in DTYPES.items():
        function = getattr(load(SOURCE), f"{name}_{suffix}")
        function.argtypes, function.restype = argument_types, result_type
        found[dtype] = function
    return found
