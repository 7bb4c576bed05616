"""Writes new keys and values into a layer's pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from specpaged_kernels.jit import TYPES, Variant, kernel
from specpaged_kernels.kv_storage import as_stored
from specpaged_kernels.limits import DTYPES, HEAD_DIMS, fits

BLOCK_H = 8  # heads of a program


@kernel(
    "keys", "values", "kv_pool", "stride_key_row", "stride_key_head", "stride_value_row", "stride_value_head",
    "stride_pool_slot", "stride_pool_kv", "stride_pool_head",
)  # fmt: skip
def _store_kernel(
    keys, values, kv_pool, slot_mapping, num_stored, num_kv_heads,
    stride_key_row, stride_key_head, stride_value_row, stride_value_head,
    stride_pool_slot, stride_pool_kv, stride_pool_head,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(num_stored):  # filler
        return
    slot = tl.load(slot_mapping + row)
    heads = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    mask = (heads < num_kv_heads) & (dims < HEAD_DIM)
    pool = kv_pool + slot * stride_pool_slot + heads * stride_pool_head + dims
    key = tl.load(keys + row * stride_key_row + heads * stride_key_head + dims, mask=mask)
    tl.store(pool, key, mask=mask)
    value = tl.load(values + row * stride_value_row + heads * stride_value_head + dims, mask=mask)
    tl.store(pool + stride_pool_kv, value, mask=mask)


def _constants(head_dim: int) -> dict[str, Any]:
    return {"HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim), "BLOCK_H": BLOCK_H, "num_warps": 4}


def variants() -> Iterator[Variant]:
    """All that `store_kv` launches for what `limits` lets through."""
    for dtype in DTYPES:
        types = {name: f"*{TYPES[dtype]}" for name in ("keys", "values", "kv_pool")}
        types |= {"slot_mapping": "*i64", "num_stored": "*i32"}
        for head_dim in HEAD_DIMS:
            if fits(head_dim, dtype):
                yield Variant(_store_kernel, types, _constants(head_dim))


def store_kv(
    keys: Tensor,  # [N, Hkv, D] dtype
    values: Tensor,  # [N, Hkv, D] dtype
    kv_pool: Tensor,  # [P * S, 2, Hkv, D] dtype; [:, 0] keys, [:, 1] values
    slot_mapping: Tensor,  # [N] int64, block * S + offset of row i
    num_stored: Tensor,  # [] or [1] int32: rows from here on are filler
) -> None:
    """What `store_kv_ref` says. D is contiguous everywhere; nothing waits for the device."""
    num_rows, num_kv_heads, head_dim = keys.shape
    _store_kernel[(num_rows, triton.cdiv(num_kv_heads, BLOCK_H))](
        keys, values, kv_pool, slot_mapping, num_stored, num_kv_heads,
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), *kv_pool.stride()[:3],
        **_constants(head_dim),
    )  # fmt: skip


def store_kv_ref(keys: Tensor, values: Tensor, kv_pool: Tensor, slot_mapping: Tensor, num_stored: Tensor) -> None:
    """Stores rows 0 .. num_stored-1 in place, each in a slot of its own. Rows past them are filler: not stored."""
    for row, slot in enumerate(slot_mapping[: int(num_stored)].tolist()):
        kv_pool[slot, 0] = as_stored(keys[row], kv_pool.dtype)
        kv_pool[slot, 1] = as_stored(values[row], kv_pool.dtype)
