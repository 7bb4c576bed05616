"""Heads that draft from a target's hidden states in one call: see heads.cpp."""

from __future__ import annotations

import ctypes
import functools

from specpaged_kernels.cpu.decoder import Decoder, Weight
from specpaged_kernels.cpu.library import INT, POINTER, SIZE
from specpaged_kernels.cpu.library import functions as library_functions


class ResAttention(ctypes.Structure):
    """The struct of the same name in the C++ file."""

    _fields_ = [
        ("norm", ctypes.c_void_p),
        ("query", Weight),
        ("key_value", Weight),
        ("query_bias", ctypes.c_void_p),
        ("key_value_bias", ctypes.c_void_p),
    ]


class Heads(ctypes.Structure):
    """The struct of the same name in the C++ file."""

    _fields_ = [
        ("decoder", Decoder),
        ("num_embeddings", ctypes.c_int64),
        ("num_features", ctypes.c_int64),
        ("is_clover", ctypes.c_int64),
        ("fc", Weight),
        ("norm_before_fc", ctypes.c_void_p),
        ("fc_norms", ctypes.c_void_p),
        ("feature_size", ctypes.c_int64),
        ("token_norm", ctypes.c_void_p),
        ("feature_norm", ctypes.c_void_p),
        ("norm_before_residual", ctypes.c_int64),
        ("norm_output", ctypes.c_int64),
        ("target_ids", ctypes.c_void_p),
        ("regressive", ResAttention),
        ("recurrent", ResAttention),
        ("first", Weight),
        ("later", Weight),
        ("first_bias", ctypes.c_void_p),
        ("later_bias", ctypes.c_void_p),
        ("head_norm", ctypes.c_void_p),
    ]


@functools.cache
def functions() -> dict:
    """A greedy proposal, in each dtype. Raises BuildError."""
    return library_functions("heads", [POINTER] * 4 + [SIZE] * 3 + [INT] + [POINTER] * 5, INT)
