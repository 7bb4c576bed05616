"""Passes of a whole decoder on a CPU: see decoder.cpp and greedy.cpp."""

from __future__ import annotations

import ctypes
import functools

from torch import Tensor

from specpaged_kernels.cpu.library import INT, POINTER, SIZE, STORAGE
from specpaged_kernels.cpu.library import functions as library_functions

LAYER_WEIGHTS = ("qkv", "o", "gate_up", "down")
LAYER_POINTERS = (
    "qkv_bias", "o_bias", "gate_up_bias", "down_bias",
    "before_attention", "after_attention", "before_mlp", "after_mlp", "heads", "cosine", "sine",
)  # fmt: skip


class Weight(ctypes.Structure):
    """The struct of the same name in linear.cpp."""

    _fields_ = [("panels", ctypes.c_void_p), ("storage", ctypes.c_int64)]

    @classmethod
    def of(cls, packed: Tensor) -> Weight:
        """What `linear.pack` has made, which must outlive this."""
        return cls(packed.data_ptr(), STORAGE[packed.dtype])


class Layer(ctypes.Structure):
    """The struct of the same name in the C++ file."""

    _fields_ = [
        *((name, Weight) for name in LAYER_WEIGHTS),
        *((name, ctypes.c_void_p) for name in LAYER_POINTERS),
        ("rope_half", ctypes.c_int64),
        ("window", ctypes.c_int64),
    ]


class Decoder(ctypes.Structure):
    """The struct of the same name in the C++ file."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in (
            "num_layers", "num_positions", "vocab_size", "hidden_size", "intermediate_size", "num_heads",
            "num_kv_heads", "head_dim", "gelu",
        )),
        ("eps", ctypes.c_float),
        ("residual_multiplier", ctypes.c_float),
        ("embedding_multiplier", ctypes.c_float),
        ("layers", ctypes.POINTER(Layer)),
        ("embedding", ctypes.c_void_p),
        ("embedding_storage", ctypes.c_int64),
        ("output", Weight),
        ("final_norm", ctypes.c_void_p),
    ]  # fmt: skip


class HiddenStates(ctypes.Structure):
    """The struct of the same name in the C++ file."""

    _fields_ = [
        ("rows", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("layers", ctypes.c_void_p),
        ("num_layers", ctypes.c_int64),
        ("layer_inputs", ctypes.c_void_p),
        ("last", ctypes.c_void_p),
        ("is_normed", ctypes.c_int64),
    ]


class StopRule(ctypes.Structure):
    """The struct of the same name in the C++ file."""

    _fields_ = [
        *((name, ctypes.c_double) for name in ("slope", "row_tokens", "pass_tokens")),
        ("intercepts", ctypes.POINTER(ctypes.c_double)),
        ("num_intercepts", ctypes.c_int64),
        *((name, ctypes.POINTER(ctypes.c_double)) for name in ("leads", "expected")),
        ("num_seqs", ctypes.c_int64),
    ]


@functools.cache
def functions() -> dict:
    """A pass, in each dtype. Raises BuildError."""
    return library_functions("decoder", [POINTER] * 6 + [SIZE, POINTER, POINTER], INT)


@functools.cache
def greedy_functions() -> dict:
    """Passes over what sequences have to run, then over each token found, in each dtype. Raises BuildError."""
    arguments = [POINTER, POINTER, POINTER, POINTER, SIZE, SIZE, SIZE, INT, *[POINTER] * 5]
    return library_functions("greedy", arguments, INT)
