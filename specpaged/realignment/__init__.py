"""Rollback arms: what rejecting drafts does to KV, in pages and in dense, left-padded batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specpaged.realignment.base import Arm
    from specpaged.realignment.dense_kv_cache import DenseKVCache


def dense_arm(name: str, kv_caches: Sequence[DenseKVCache], max_model_len: int, num_rows: int) -> Arm:
    """An arm over dense KV of up to num_rows sequences in a pass. `name` is one of config.ROLLBACKS but "truncate"."""
    if name == "group":
        from specpaged.realignment.group import Group

        return Group(kv_caches, max_model_len, num_rows)
    if name == "compact":  # defining kernels takes seconds
        from specpaged.realignment.compact import Compact

        return Compact(kv_caches, max_model_len)
    from specpaged.realignment.batch_min import BatchMin
    from specpaged.realignment.gather import Gather
    from specpaged.realignment.repad import Repad

    return {"repad": Repad, "gather": Gather, "batch_min": BatchMin}[name](kv_caches, max_model_len)
