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
    memory = default_bytes(config)
    if has_own_pool(config, models):
        memory -= config.speculative_config.kv_cache_memory_bytes or 0
    num_blocks = memory // _block_bytes(config, models)[0]
    return min(length, max(1, num_blocks) * config.block_size)


def new_kv_caches(config: EngineConfig, models: Sequence[LoadedModel]) -> list[PagedKVCache]:
    """One cache for each model, target first; `config.max_model_len` is resolved.

    Raises:
        ValueError: naming the argument that asks for too much of the memory, and what is allowed.
    """
    check(config, models)
    of_pools = zip(models, _num_blocks(config, models), strict=True)
    return [PagedKVCache(m.kv_spec, num_blocks, config.block_size, m.kv_dtype, m.device) for m, num_blocks in of_pools]


def check(config: EngineConfig, models: Sequence[LoadedModel]) -> None:
    """Raise what `new_kv_caches` does, and allocate nothing."""
    memory, size = config.kv_cache_memory_bytes or default_bytes(config), config.block_size
    own_pool, most_drafts = has_own_pool(config, models), max_draft_tokens(config)
    num_blocks, *of_draft = _num_blocks(config, models)
    of_token = _block_bytes(config, models)[0] // size
    of_target = memory - (of_draft[0] * _block_bytes(config, models)[1] if own_pool else 0)
    if own_pool and of_draft[0] * size < most_drafts + 2:
        name, value = "kv_cache_memory_bytes", config.speculative_config.kv_cache_memory_bytes
        raise ValueError(
            f"speculative_config[{name!r}]={value} holds {of_draft[0] * size} tokens of the draft's KV; allowed: at "
            f"least {most_drafts + 2} (num_speculative_tokens + 2), that is "
            f"{-(-(most_drafts + 2) // size) * _block_bytes(config, models)[1]} bytes"
        )
    beside = f" beside the draft's {memory - of_target}" if own_pool else ""
    if num_blocks * size < most_drafts + 2:
        raise ValueError(
            f"speculative_config['num_speculative_tokens']={most_drafts} needs KV for {most_drafts + 2} "
            f"tokens of a sequence; kv_cache_memory_bytes={memory}{beside} holds {max(0, num_blocks) * size} "
            f"({of_token} bytes per token, block_size {size})"
        )
    check_drafts_fit(config)
    blocks_per_sequence = -(-config.max_model_len // size)
    if num_blocks < blocks_per_sequence:
        raise ValueError(
            f"kv_cache_memory_bytes={memory}{beside} holds {num_blocks} blocks = {num_blocks * size} tokens; "
            f"allowed: at least one sequence of max_model_len={config.max_model_len}, that is "
            f"{blocks_per_sequence * size * of_token + memory - of_target} bytes, or a smaller max_model_len"
        )


def has_own_pool(config: EngineConfig, models: Sequence[LoadedModel]) -> bool:
    """Whether a draft model's KV lies in a pool of its own size, in blocks of its own."""
    speculative = config.speculative_config
    return len(models) > 1 and (speculative.kv_cache_memory_bytes is not None or speculative.kv_window is not None)


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


def _block_bytes(config: EngineConfig, models: Sequence[LoadedModel]) -> list[int]:
    """Bytes of a block of each allocator: of one in all pools, or of the target's and of the draft's."""
    of_models = [config.block_size * bytes_per_token([model]) for model in models]
    return of_models if has_own_pool(config, models) else [sum(of_models)]


def _num_blocks(config: EngineConfig, models: Sequence[LoadedModel]) -> list[int]:
    """Blocks that the KV memory holds, of each model's pool."""
    of_target, *of_draft = _block_bytes(config, models)
    blocks_per_sequence = -(-config.max_model_len // config.block_size)
    memory = config.kv_cache_memory_bytes or default_bytes(config)
    num_draft_blocks = []
    if of_draft:
        speculative = config.speculative_config
        num_read = min(config.max_model_len, speculative.kv_window or config.max_model_len)
        num_wanted = config.num_residents * -(-num_read // config.block_size)  # in which nobody goes without
        if speculative.kv_cache_memory_bytes is not None:
            num_wanted = min(num_wanted, speculative.kv_cache_memory_bytes // of_draft[0])
        else:  # nor in as many blocks as the target has
            num_wanted = min(num_wanted, memory // (of_target + of_draft[0]))
        num_draft_blocks = [num_wanted]
        memory -= num_wanted * of_draft[0]
    num_blocks = memory // of_target
    if config.kv_cache_memory_bytes is None:
        num_blocks = min(num_blocks, config.num_residents * blocks_per_sequence)
    return [num_blocks, *(num_draft_blocks or [num_blocks] * (len(models) - 1))]
