"""The layout and the scheduler of a study, by the names that a configuration has for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from specpaged.config import BY_HALVES, EngineConfig
from specpaged.research.eqspec import EqspecScheduler
from specpaged.research.exspec import ExspecScheduler
from specpaged.scheduling.continuous import ContinuousScheduler
from specpaged.scheduling.halves import HalvesScheduler

if TYPE_CHECKING:
    from specpaged.engine.kv_layout import KVLayout
    from specpaged.research.dense_kv_cache import DenseKVCache


def scheduler_of(config: EngineConfig) -> Callable[..., ContinuousScheduler]:
    """What makes the scheduler that `config.schedule` names; its arguments are ContinuousScheduler's."""
    if config.schedule == "exspec":
        return partial(ExspecScheduler, window=config.num_residents, sort_by_length=config.sort_by_length)
    if config.schedule in BY_HALVES:
        return HalvesScheduler
    return {"continuous": ContinuousScheduler, "eqspec": EqspecScheduler}[config.schedule]


def dense_layout(name: str, kv_caches: Sequence[DenseKVCache], max_model_len: int, num_rows: int) -> KVLayout:
    """A layout over dense KV of up to num_rows sequences in a pass.

    `name` is one of config.ROLLBACKS but "truncate".
    """
    if name == "group":
        from specpaged.research.group import Group

        return Group(kv_caches, max_model_len, num_rows)
    if name == "compact":  # defining kernels takes seconds
        from specpaged.research.compact import Compact

        return Compact(kv_caches, max_model_len)
    from specpaged.research.batch_min import BatchMin
    from specpaged.research.gather import Gather
    from specpaged.research.repad import Repad

    return {"repad": Repad, "gather": Gather, "batch_min": BatchMin}[name](kv_caches, max_model_len)
