"""How much KV an engine holds, and its tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specpaged.config import EngineConfig
from specpaged.modeling.loaded_model import LoadedModel
from specpaged.modeling.numerics import KV_PERIOD
from specpaged.paging.kv_cache import PagedKVCache
from specpaged.realignment.dense_kv_cache import DenseKVCache
from specpaged.realignment.group import GroupKVCache

DEFAULT_CPU_BYTES = 1 << 30
GPU_FRACTION = 0.8


def max_model_len(config: EngineConfig, models: Sequence[LoadedModel]) -> int:
    """The target's; where neither a length nor a KV memory was asked for, cut to what the default memory holds."""
    length = models[0].max_model_len
    if config.max_model_len is not None or config.kv_cache_memory_bytes is not None:
        return length
    num_blocks = _default_bytes(config) // (_bytes_per_token(models) * config.block_size)
    return min(length, max(1, num_blocks) * config.block_size)


def new_kv_caches(config: EngineConfig, models: Sequence[LoadedModel]) -> list[PagedKVCache | DenseKVCache]:
    """One for each model, target first; `config.max_model_len` is resolved.

    Raises:
        ValueError: naming the argument that asks for too much of the memory, and what is allowed.
    """
    check(config, models)
    if config.rollback == "truncate":
        num_blocks = _num_blocks(config, models)
        return [PagedKVCache(m.kv_spec, num_blocks, config.block_size, m.dtype, m.device) for m in models]
    num_rows, num_columns = config.max_num_seqs, _num_columns(config, models)
    if config.rollback == "group":
        num_caches = config.num_residents
        return [GroupKVCache(m.kv_spec, num_rows, num_columns, m.dtype, m.device, num_caches) for m in models]
    return [DenseKVCache(m.kv_spec, num_rows, num_columns, m.dtype, m.device) for m in models]


def check(config: EngineConfig, models: Sequence[LoadedModel]) -> None:
    """Raises what `new_kv_caches` does, and allocates nothing."""
    (_check_pages if config.rollback == "truncate" else _check_rows)(config, models)


def _check_pages(config: EngineConfig, models: Sequence[LoadedModel]) -> None:
    num_blocks, memory = _num_blocks(config, models), config.kv_cache_memory_bytes or _default_bytes(config)
    bytes_per_token, max_draft_tokens = _bytes_per_token(models), _max_draft_tokens(config)
    if num_blocks * config.block_size < max_draft_tokens + 2:
        raise ValueError(
            f"speculative_config['num_speculative_tokens']={max_draft_tokens} needs KV for {max_draft_tokens + 2} "
            f"tokens of a sequence; kv_cache_memory_bytes={memory} holds {num_blocks * config.block_size} "
            f"({bytes_per_token} bytes per token, block_size {config.block_size})"
        )
    _check_drafts_fit(config)
    blocks_per_sequence = -(-config.max_model_len // config.block_size)
    if num_blocks < blocks_per_sequence:
        raise ValueError(
            f"kv_cache_memory_bytes={memory} holds {num_blocks} blocks = {num_blocks * config.block_size} tokens; "
            f"allowed: at least one sequence of max_model_len={config.max_model_len}, that is "
            f"{blocks_per_sequence * config.block_size * bytes_per_token} bytes, or a smaller max_model_len"
        )


def _check_rows(config: EngineConfig, models: Sequence[LoadedModel]) -> None:
    _check_drafts_fit(config)
    num_rows, num_columns = config.max_num_seqs, _num_columns(config, models)
    rows = f"{num_rows} rows"
    smaller = f"max_model_len={config.max_model_len} or max_num_seqs={config.max_num_seqs}"
    if config.rollback == "group":
        num_rows += config.num_residents
        rows += f" and {config.num_residents} caches"
        if config.schedule == "exspec":
            smaller += f" or window={config.num_residents}"
    wanted = num_rows * num_columns * _bytes_per_token(models)
    memory = config.kv_cache_memory_bytes or _default_bytes(config)
    if wanted > memory:
        raise ValueError(
            f"rollback={config.rollback!r} keeps {rows} of {num_columns} tokens, which take {wanted} bytes of "
            f"kv_cache_memory_bytes={memory}; allowed: as much memory, or a smaller {smaller}"
        )


def _check_drafts_fit(config: EngineConfig) -> None:
    max_draft_tokens = _max_draft_tokens(config)
    if max_draft_tokens + 2 > config.max_model_len:
        raise ValueError(
            f"speculative_config['num_speculative_tokens']={max_draft_tokens} must be at most "
            f"max_model_len - 2 = {config.max_model_len - 2}"
        )


def _max_draft_tokens(config: EngineConfig) -> int:
    return config.speculative_config.max_draft_tokens if config.speculative_config else 0


def _num_columns(config: EngineConfig, models: Sequence[LoadedModel]) -> int:
    """Of a dense row."""
    num_columns = config.max_model_len + _max_draft_tokens(config)
    if any(model.backend == "torch" for model in models):  # which reads rows beyond their end, up to its buckets
        num_columns += KV_PERIOD
    return num_columns


def _bytes_per_token(models: Sequence[LoadedModel]) -> int:
    return sum(model.kv_spec.num_elements * model.dtype.itemsize for model in models)


def _default_bytes(config: EngineConfig) -> int:
    if torch.device(config.device).type == "cuda":
        return int(torch.cuda.mem_get_info(config.device)[0] * GPU_FRACTION)
    return DEFAULT_CPU_BYTES


def _num_blocks(config: EngineConfig, models: Sequence[LoadedModel]) -> int:
    """Blocks that the KV memory holds, one block taking its bytes in the pools of all models."""
    block_bytes = _bytes_per_token(models) * config.block_size
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes // block_bytes
    blocks_per_sequence = -(-config.max_model_len // config.block_size)
    return min(_default_bytes(config) // block_bytes, config.num_residents * blocks_per_sequence)
