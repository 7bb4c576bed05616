"""How much KV an engine's pages hold, and their tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specpaged.config import EngineConfig
from specpaged.modeling.loaded_model import LoadedModel
from specpaged.paging.kv_cache import PagedKVCache

DEFAULT_CPU_BYTES = 1 << 30
GPU_FRACTION = 0.8


def max_model_len(config: EngineConfig, models: Sequence[LoadedModel]) -> int:
    """The longest sequence in tokens that an engine may take: as long as the target can, unless memory says less.

    Memory has a say where the user named neither a length nor a KV memory: then the default memory must hold one
    sequence.
    """
    length = models[0].max_model_len
    if config.max_model_len is not None or config.kv_cache_memory_bytes is not None:
        return length
    num_blocks = default_bytes(config) // (bytes_per_token(models) * config.block_size)
    return min(length, max(1, num_blocks) * config.block_size)


def new_kv_caches(config: EngineConfig, models: Sequence[LoadedModel]) -> list[PagedKVCache]:
    """One cache for each model, target first; `config.max_model_len` is resolved.

    Raises:
        ValueError: naming the argument that asks for too much of the memory, and what is allowed.
    """
    check(config, models)
    num_blocks = _num_blocks(config, models)
    return [PagedKVCache(m.kv_spec, num_blocks, config.block_size, m.kv_dtype, m.device) for m in models]


def check(config: EngineConfig, models: Sequence[LoadedModel]) -> None:
    """Raise what `new_kv_caches` does, and allocate nothing."""
    num_blocks, memory = _num_blocks(config, models), config.kv_cache_memory_bytes or default_bytes(config)
    of_token, most_drafts = bytes_per_token(models), max_draft_tokens(config)
    if num_blocks * config.block_size < most_drafts + 2:
        raise ValueError(
            f"speculative_config['num_speculative_tokens']={most_drafts} needs KV for {most_drafts + 2} "
            f"tokens of a sequence; kv_cache_memory_bytes={memory} holds {num_blocks * config.block_size} "
            f"({of_token} bytes per token, block_size {config.block_size})"
        )
    check_drafts_fit(config)
    blocks_per_sequence = -(-config.max_model_len // config.block_size)
    if num_blocks < blocks_per_sequence:
        raise ValueError(
            f"kv_cache_memory_bytes={memory} holds {num_blocks} blocks = {num_blocks * config.block_size} tokens; "
            f"allowed: at least one sequence of max_model_len={config.max_model_len}, that is "
            f"{blocks_per_sequence * config.block_size * of_token} bytes, or a smaller max_model_len"
        )


def check_drafts_fit(config: EngineConfig) -> None:
    """Raise ValueError if the longest draft does not fit behind a prompt of one token."""
    most = max_draft_tokens(config)
    if most + 2 > config.max_model_len:
        raise ValueError(
            f"speculative_config['num_speculative_tokens']={most} must be at most "
            f"max_model_len - 2 = {config.max_model_len - 2}"
        )


def max_draft_tokens(config: EngineConfig) -> int:
    """The longest draft of any step; 0 without speculation."""
    return config.speculative_config.max_draft_tokens if config.speculative_config else 0


def bytes_per_token(models: Sequence[LoadedModel]) -> int:
    """Bytes of one token's KV in the pools of all models."""
    return sum(model.kv_spec.num_elements * model.kv_dtype.itemsize for model in models)


def default_bytes(config: EngineConfig) -> int:
    """The most bytes of KV that an engine takes whose user named no memory: a constant on a CPU, a share on a GPU."""
    if torch.device(config.device).type == "cuda":
        return int(torch.cuda.mem_get_info(config.device)[0] * GPU_FRACTION)
    return DEFAULT_CPU_BYTES


def _num_blocks(config: EngineConfig, models: Sequence[LoadedModel]) -> int:
    """Blocks that the KV memory holds, one block taking its bytes in the pools of all models."""
    block_bytes = bytes_per_token(models) * config.block_size
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes // block_bytes
    blocks_per_sequence = -(-config.max_model_len // config.block_size)
    return min(default_bytes(config) // block_bytes, config.num_residents * blocks_per_sequence)
