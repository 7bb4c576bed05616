"""Paged attention on a CPU: see paged_attention.cpp."""

from __future__ import annotations

import ctypes
import functools
import math

import torch
from torch import Tensor

from specpaged_kernels.cpu.library import POINTER, SIZE, functions


class Pass(ctypes.Structure):
    """The arguments that layers of one geometry share; the struct of the same name in the C++ file."""

    _fields_ = [
        *((name, ctypes.c_int) for name in (
            "num_seqs", "num_tokens", "num_rows", "block_size", "num_heads", "num_kv_heads", "head_dim", "num_threads"
        )),
        *((name, ctypes.c_int64) for name in ("table_stride", "block_stride")),
        *((name, ctypes.c_void_p) for name in ("slot_mapping", "page_table", "cu_query_lens", "context_lens")),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("window", ctypes.c_int),
        ("sinks", ctypes.c_void_p),
    ]  # fmt: skip


@functools.cache
def _functions() -> dict:
    return functions("paged_attention", [POINTER, *[POINTER, SIZE, SIZE] * 3, POINTER, POINTER])


def make_pass(
    num_rows: int,
    slot_mapping: Tensor,
    page_table: Tensor,
    cu_query_lens: Tensor,
    context_lens: Tensor,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scaling: float | None,
    softcap: float | None,
    window: int | None = None,
    sinks: Tensor | None = None,
    block_stride: int | None = None,
) -> Pass:
    """The struct of these arguments of `paged_attention`; the tensors must outlive it."""
    return Pass(
        context_lens.shape[0], slot_mapping.shape[0], num_rows, block_size, num_heads, num_kv_heads, head_dim,
        torch.get_num_threads(), page_table.stride(0), block_stride or block_size,
        slot_mapping.data_ptr(), page_table.data_ptr(), cu_query_lens.data_ptr(), context_lens.data_ptr(),
        1 / math.sqrt(head_dim) if scaling is None else scaling, softcap or 0.0, window or 0,
        None if sinks is None else sinks.data_ptr(),
    )  # fmt: skip


def paged_attention(
    query: Tensor,  # [N, Hq, D] dtype
    key: Tensor,  # [N, Hkv, D] dtype
    value: Tensor,  # [N, Hkv, D] dtype
    kv_pool: Tensor,  # [P * S, 2, Hkv, D] dtype; [:, 0] keys, [:, 1] values
    slot_mapping: Tensor,  # [num_tokens] int64: rows past them are filler
    page_table: Tensor,  # [B, max_blocks] int32
    cu_query_lens: Tensor,  # [B + 1] int32, of which the last is num_tokens
    context_lens: Tensor,  # [B] int32, before the pass
    block_size: int,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [Hq] float32
    output: Tensor | None = None,  # [N, Hq, D] dtype, contiguous, written as a whole
    block_stride: int | None = None,  # slots from a block to the next one; default: block_size
) -> Tensor:  # [N, Hq, D] dtype, zeros in filler rows
    """`store_kv_ref`, then `paged_attention_ref`. The pool is contiguous."""
    num_rows, num_heads, head_dim = query.shape
    for name, tensor, heads in (("key", key, kv_pool.shape[2]), ("value", value, kv_pool.shape[2])):
        if tensor.shape != (num_rows, heads, head_dim) or tensor.dtype != query.dtype:
            raise ValueError(f"{name} {list(tensor.shape)} {tensor.dtype} does not fit the query and the pool")
    if kv_pool.dtype != query.dtype or kv_pool.shape[3] != head_dim or num_heads % kv_pool.shape[2]:
        raise ValueError(f"query {list(query.shape)} {query.dtype} does not fit the pool's {list(kv_pool.shape)}")
    query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
    output = torch.empty(query.shape, dtype=query.dtype) if output is None else output
    call = make_pass(
        num_rows, slot_mapping, page_table, cu_query_lens, context_lens, block_size, num_heads, key.shape[1], head_dim,
        scaling, softcap, window, sinks, block_stride,
    )  # fmt: skip
    _functions()[query.dtype](
        ctypes.addressof(call),
        query.data_ptr(), query.stride(0), query.stride(1),
        key.data_ptr(), key.stride(0), key.stride(1),
        value.data_ptr(), value.stride(0), value.stride(1),
        kv_pool.data_ptr(), output.data_ptr(),
    )  # fmt: skip
    return output
