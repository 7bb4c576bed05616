"""What is run, in phases, and what is drafted in it: the same for both engines."""

from __future__ import annotations

from typing import Any, NamedTuple

from benchmarks.vllm_eagle3.variants import VOCAB_SIZE

K = 4
MAX_TOKENS = 24  # of each output
MAX_NUM_BATCHED_TOKENS = 128
COMMON: dict[str, Any] = {
    "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS, "enforce_eager": True,
    "enable_prefix_caching": True, "dtype": "float32", "kv_cache_memory_bytes": 64 << 20,
}  # fmt: skip
PHASES = ("prompts", "cached prefixes", "chunks")
AS_IS = "chunks, as it is"  # of vLLM


class Proposal(NamedTuple):
    """What was drafted behind `known` tokens, in which phase."""

    phase: str
    known: tuple[int, ...]
    drafts: tuple[int, ...]
    paired: tuple[tuple[int, int], ...] = ()  # position and token, where features were paired with another one


def prompts_of(phase: str) -> list[list[list[int]]]:
    """Batches that are run one behind the other."""
    import torch

    generator = torch.Generator().manual_seed(PHASES.index(phase))

    def prompt(length: int) -> list[int]:
        return torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist()

    if phase == "prompts":  # each batch in one pass
        return [[prompt(length) for length in (3, 5, 8, 13, 21, 34)], [prompt(100)]]
    if phase == "cached prefixes":
        first = prompt(110)
        return [[first], [first[:104] + prompt(9), first], [first[:70] + prompt(40)]]
    return [[prompt(length) for length in (150, 290, 200)]]
