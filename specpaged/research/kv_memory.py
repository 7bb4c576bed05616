"""How much KV an engine with dense, left-padded batches holds, and its tensors."""

from __future__ import annotations

from collections.abc import Sequence

from specpaged.config import EngineConfig
from specpaged.engine import kv_memory as pages
from specpaged.modeling.loaded_model import LoadedModel
from specpaged.modeling.numerics import KV_PERIOD
from specpaged.research.dense_kv_cache import DenseKVCache
from specpaged.research.group import GroupKVCache


def new_kv_caches(config: EngineConfig, models: Sequence[LoadedModel]) -> list[DenseKVCache]:
    """One cache for each model, target first; `config.max_model_len` is resolved.

    Raises:
        ValueError: naming the argument that asks for too much of the memory, and what is allowed.
    """
    check(config, models)
    num_rows, num_columns = config.max_num_seqs, _num_columns(config, models)
    if config.rollback == "group":
        num_caches = config.num_residents
        return [GroupKVCache(m.kv_spec, num_rows, num_columns, m.kv_dtype, m.device, num_caches) for m in models]
    return [DenseKVCache(m.kv_spec, num_rows, num_columns, m.kv_dtype, m.device) for m in models]


def check(config: EngineConfig, models: Sequence[LoadedModel]) -> None:
    """Raise what the caches of any rollback would raise, pages' included, and allocate nothing."""
    if config.rollback == "truncate":
        pages.check(config, models)
        return
    pages.check_drafts_fit(config)
    num_rows, num_columns = config.max_num_seqs, _num_columns(config, models)
    rows = f"{num_rows} rows"
    smaller = f"max_model_len={config.max_model_len} or max_num_seqs={config.max_num_seqs}"
    if config.rollback == "group":
        num_rows += config.num_residents
        rows += f" and {config.num_residents} caches"
        if config.schedule == "exspec":
            smaller += f" or window={config.num_residents}"
    wanted = num_rows * num_columns * pages.bytes_per_token(models)
    memory = config.kv_cache_memory_bytes or pages.default_bytes(config)
    if wanted > memory:
        raise ValueError(
            f"rollback={config.rollback!r} keeps {rows} of {num_columns} tokens, which take {wanted} bytes of "
            f"kv_cache_memory_bytes={memory}; allowed: as much memory, or a smaller {smaller}"
        )


def _num_columns(config: EngineConfig, models: Sequence[LoadedModel]) -> int:
    """Tokens that a dense row has room for."""
    num_columns = config.max_model_len + pages.max_draft_tokens(config)
    if config.rollback == "group":
        # Its rows stay where they are until the next step: new drafts run behind all that have just been accepted.
        num_columns += pages.max_draft_tokens(config)
    if any(model.backend == "torch" for model in models):  # which reads rows beyond their end, up to its buckets
        num_columns += KV_PERIOD
    return num_columns
