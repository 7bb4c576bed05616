"""Paged attention on a CPU: see paged_attention.cpp."""

from __future__ import annotations

import ctypes
import functools
import math

import torch
from torch import Tensor

from specpaged_kernels.cpu.library import INT, KV_STORAGE, POINTER, SIZE, check_status, check_tensor, functions

INT32_MAX = 2**31 - 1  # of what is multiplied by a block's number


class Pass(ctypes.Structure):
    """The arguments that layers of one geometry share; the struct of the same name in the C++ file."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in (
            "num_seqs", "num_tokens", "num_rows", "block_size", "num_heads", "num_kv_heads", "head_dim", "num_threads",
            "num_slots", "table_width", "table_stride", "block_stride", "kv_storage",
        )),
        *((name, ctypes.c_void_p) for name in ("slot_mapping", "page_table", "cu_query_lens", "context_lens")),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("window", ctypes.c_int64),
        ("sinks", ctypes.c_void_p),
    ]  # fmt: skip


@functools.cache
def _functions() -> dict:
    return functions("paged_attention", [POINTER, *[POINTER, SIZE, SIZE] * 3, POINTER, POINTER], INT)


def make_pass(
    num_rows: int,
    num_slots: int,  # of each layer's pool
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
    kv_dtype: torch.dtype = torch.float32,  # one of KV_STORAGE
) -> Pass:
    """The struct of these arguments of `paged_attention`; the tensors must outlive it. Raises ValueError."""
    num_seqs, num_tokens = context_lens.numel(), slot_mapping.numel()  # len() of a tensor takes four times as long
    if (
        slot_mapping.dtype != torch.int64
        or page_table.dtype != torch.int32
        or cu_query_lens.dtype != torch.int32
        or context_lens.dtype != torch.int32
        or not (slot_mapping.is_contiguous() and cu_query_lens.is_contiguous() and context_lens.is_contiguous())
        or not (num_seqs == page_table.shape[0] == cu_query_lens.numel() - 1)
        or not (slot_mapping.is_cpu and page_table.is_cpu and cu_query_lens.is_cpu and context_lens.is_cpu)
        or (page_table.shape[1] > 1 and page_table.stride(1) != 1)
    ):  # all at once: it is asked several times in a step
        check_tensor("slot_mapping", slot_mapping, (num_tokens,), torch.int64)
        check_tensor("context_lens", context_lens, (num_seqs,), torch.int32)
        check_tensor("cu_query_lens", cu_query_lens, (num_seqs + 1,), torch.int32)
        check_tensor("page_table", page_table, (num_seqs, page_table.shape[1]), torch.int32)
    block_stride = block_size if block_stride is None else block_stride
    if (
        min(block_size, block_stride, num_heads, num_kv_heads, head_dim) < 1
        or max(block_size, block_stride) > INT32_MAX
    ):
        for name, value in (
            ("block_size", block_size), ("block_stride", block_stride), ("num_heads", num_heads),
            ("num_kv_heads", num_kv_heads), ("head_dim", head_dim),
        ):  # fmt: skip
            if not 1 <= value <= INT32_MAX:
                raise ValueError(f"{name}={value}; allowed: 1 to {INT32_MAX}")
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads={num_heads}; allowed: a multiple of num_kv_heads={num_kv_heads}")
    if num_rows < num_tokens:
        raise ValueError(f"num_rows={num_rows}; allowed: {num_tokens} or more, the entries of slot_mapping")
    check_tensor("sinks", sinks, (num_heads,), torch.float32)
    return Pass(
        num_seqs, num_tokens, num_rows, block_size, num_heads, num_kv_heads, head_dim, torch.get_num_threads(),
        num_slots, page_table.shape[1], page_table.stride(0), block_stride, KV_STORAGE[kv_dtype],
        slot_mapping.data_ptr(), page_table.data_ptr(), cu_query_lens.data_ptr(), context_lens.data_ptr(),
        1 / math.sqrt(head_dim) if scaling is None else scaling, softcap or 0.0, window or 0,
        None if sinks is None else sinks.data_ptr(),
    )  # fmt: skip


def paged_attention(
    query: Tensor,  # [N, Hq, D] dtype
    key: Tensor,  # [N, Hkv, D] dtype
    value: Tensor,  # [N, Hkv, D] dtype
    kv_pool: Tensor,  # [P * S, 2, Hkv, D], one of KV_STORAGE; [:, 0] keys, [:, 1] values
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
    """`store_kv_ref`, then `paged_attention_ref`. The pool is contiguous.

    Raises:
        ValueError: an argument's shape, dtype or strides do not fit the others.
        IndexError: a slot, a block or a length leads outside of the pool or of the page table; nothing was written.
        MemoryError: there is none for what is computed on the way.
    """
    num_rows, num_heads, head_dim = query.shape
    num_slots, num_kv_heads = len(kv_pool), kv_pool.shape[2]
    check_tensor("query", query, query.shape, query.dtype, contiguous=False)
    kv_dtype = kv_pool.dtype if kv_pool.dtype in KV_STORAGE else query.dtype
    check_tensor("kv_pool", kv_pool, (num_slots, 2, num_kv_heads, head_dim), kv_dtype)
    check_tensor("key", key, (num_rows, num_kv_heads, head_dim), query.dtype, contiguous=False)
    check_tensor("value", value, (num_rows, num_kv_heads, head_dim), query.dtype, contiguous=False)
    check_tensor("output", output, query.shape, query.dtype)
    query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
    output = torch.empty(query.shape, dtype=query.dtype) if output is None else output
    call = make_pass(
        num_rows, num_slots, slot_mapping, page_table, cu_query_lens, context_lens, block_size, num_heads,
        num_kv_heads, head_dim, scaling, softcap, window, sinks, block_stride, kv_dtype,
    )  # fmt: skip
    status = _functions()[query.dtype](
        ctypes.addressof(call),
        query.data_ptr(), query.stride(0), query.stride(1),
        key.data_ptr(), key.stride(0), key.stride(1),
        value.data_ptr(), value.stride(0), value.stride(1),
        kv_pool.data_ptr(), output.data_ptr(),
    )  # fmt: skip
    check_status(status)
    return output
