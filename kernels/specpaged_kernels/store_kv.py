"""Writes new keys and values into a layer's pages."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _store_kernel(
    keys, values, kv_pool, slot_mapping, num_stored,
    stride_key_row, stride_key_head, stride_value_row, stride_value_head,
    stride_pool_slot, stride_pool_kv, stride_pool_head,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(num_stored):  # filler
        return
    slot = tl.load(slot_mapping + row)
    heads = tl.arange(0, BLOCK_H)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    mask = (heads < NUM_KV_HEADS) & (dims < HEAD_DIM)
    pool = kv_pool + slot * stride_pool_slot + heads * stride_pool_head + dims
    key = tl.load(keys + row * stride_key_row + heads * stride_key_head + dims, mask=mask)
    tl.store(pool, key, mask=mask)
    value = tl.load(values + row * stride_value_row + heads * stride_value_head + dims, mask=mask)
    tl.store(pool + stride_pool_kv, value, mask=mask)


def store_kv(
    keys: Tensor,  # [N, Hkv, D] dtype
    values: Tensor,  # [N, Hkv, D] dtype
    kv_pool: Tensor,  # [P * S, 2, Hkv, D] dtype; [:, 0] keys, [:, 1] values
    slot_mapping: Tensor,  # [N] int64, block * S + offset of row i
    num_stored: Tensor,  # [] or [1] int32: rows from here on are filler
) -> None:
    """What `store_kv_ref` says. D is contiguous everywhere; nothing waits for the device."""
    num_rows, num_kv_heads, head_dim = keys.shape
    _store_kernel[(num_rows,)](
        keys, values, kv_pool, slot_mapping, num_stored,
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), *kv_pool.stride()[:3],
        HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim),
        NUM_KV_HEADS=num_kv_heads, BLOCK_H=triton.next_power_of_2(num_kv_heads), num_warps=4,
    )  # fmt: skip


def store_kv_ref(keys: Tensor, values: Tensor, kv_pool: Tensor, slot_mapping: Tensor, num_stored: Tensor) -> None:
    """Stores rows 0 .. num_stored-1 in place, each in a slot of its own. Rows past them are filler: not stored."""
    for row, slot in enumerate(slot_mapping[: int(num_stored)].tolist()):
        kv_pool[slot, 0] = keys[row]
        kv_pool[slot, 1] = values[row]
