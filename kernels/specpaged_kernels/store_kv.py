"""Writes new keys and values into a layer's pages."""

from __future__ import annotations

from torch import Tensor


def store_kv_ref(
    keys: Tensor,  # [N, Hkv, D] dtype
    values: Tensor,  # [N, Hkv, D] dtype
    kv_pool: Tensor,  # [P * S, 2, Hkv, D] dtype; [:, 0] keys, [:, 1] values
    slot_mapping: Tensor,  # [num_stored] int64, num_stored <= N: block * S + offset of row i, each slot once
) -> None:
    """Stores rows 0 .. num_stored-1 in place. Rows past them are filler and are not stored."""
    for row, slot in enumerate(slot_mapping.tolist()):
        kv_pool[slot, 0] = keys[row]
        kv_pool[slot, 1] = values[row]
