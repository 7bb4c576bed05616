"""A pass of a whole decoder on a CPU: see decoder.cpp."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from specpaged_kernels.cpu.build import load
from specpaged_kernels.cpu.paged_attention import DTYPES

LAYER_POINTERS = (
    "qkv", "qkv_bias", "o", "o_bias", "gate_up", "gate_up_bias", "down", "down_bias",
    "before_attention", "after_attention", "before_mlp", "after_mlp", "heads", "cosine", "sine",
)  # fmt: skip


class Layer(ctypes.Structure):
    """The struct of the same name in the C++ file."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in LAYER_POINTERS),
        ("rope_half", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("pool", ctypes.c_void_p),
    ]


class Decoder(ctypes.Structure):
    """The struct of the same name in the C++ file."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in (
            "num_layers", "vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim",
            "gelu",
        )),
        ("eps", ctypes.c_float),
        ("residual_multiplier", ctypes.c_float),
        ("embedding_multiplier", ctypes.c_float),
        ("layers", ctypes.POINTER(Layer)),
        ("embedding", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("final_norm", ctypes.c_void_p),
    ]  # fmt: skip


@functools.cache
def function(dtype: torch.dtype) -> ctypes._CFuncPtr:
    """decoder_float32 or decoder_bfloat16 of the C++ file. Raises BuildError."""
    found = getattr(load(Path(__file__).with_suffix(".cpp")), f"decoder_{DTYPES[dtype]}")
    pointer = ctypes.c_void_p
    found.argtypes = [pointer, pointer, pointer, pointer, pointer, ctypes.c_int64, pointer]
    found.restype = None
    return found
