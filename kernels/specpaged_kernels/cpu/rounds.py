"""Several rounds of greedy decoding in one call: see rounds.cpp."""

from __future__ import annotations

import ctypes
import functools

from specpaged_kernels.cpu.build import load
from specpaged_kernels.cpu.decoder import StopRule
from specpaged_kernels.cpu.library import INT, POINTER, SIZE, SOURCE


class Model(ctypes.Structure):
    """The struct of the same name in the C++ file."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("greedy", "decoder", "geometry", "pools")),
        *((name, ctypes.c_int64) for name in ("num_ids", "reads_last", "num_layers")),
        ("layers", ctypes.c_void_p),
        ("hidden_bytes", ctypes.c_int64),
    ]


class Choices(ctypes.Structure):
    """The struct of the same name in the C++ file."""

    _fields_ = [
        ("num_lookups", ctypes.c_int64),
        ("rules", ctypes.POINTER(StopRule)),
        *((name, ctypes.POINTER(ctypes.c_int64)) for name in ("rows", "most")),
        ("least", ctypes.POINTER(ctypes.c_double)),
        ("indexes", ctypes.POINTER(ctypes.c_void_p)),
        ("tells", ctypes.c_int64),
    ]


@functools.cache
def function() -> object:
    """Raises BuildError."""
    found = load(SOURCE).rounds
    found.argtypes = [
        POINTER,
        POINTER,
        POINTER,
        POINTER,
        SIZE,
        SIZE,
        POINTER,
        SIZE,
        SIZE,
        POINTER,
        POINTER,
        SIZE,
        *[POINTER] * 4,
    ]
    found.restype = INT
    return found
