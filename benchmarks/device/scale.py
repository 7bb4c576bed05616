"""Sizes of a run: real ones, and tiny ones that Triton's interpreter can do, to try the script without a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Scale:
    """B, context lengths and so on, by section."""

    device: str
    dtypes: tuple[torch.dtype, ...]
    num_kv_heads: int
    head_dim: int
    groups: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    context_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    block_size: int
    linear_rows: tuple[int, ...]
    linear_shapes: dict[str, tuple[int, int, int]]  # name: (N, K, how many a forward pass has)
    vocab_size: int
    num_layers: int
    num_prompts: int

    @property
    def on_gpu(self) -> bool:
        """Whether times mean anything."""
        return self.device == "cuda"


# Qwen3-8B: hidden 4096, 32 query and 8 KV heads of 128, MLP 12288, 36 layers, vocabulary 151936.
FULL = Scale(
    device="cuda",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    num_kv_heads=8,
    head_dim=128,
    groups=(4, 8),
    batch_sizes=(1, 8, 32, 64),
    context_lens=(1024, 4096, 16384),
    query_lens=(1, 6),
    block_size=64,
    linear_rows=(1, 2, 4, 6, 8, 16, 32, 48, 64),
    linear_shapes={
        "qkv": (6144, 4096, 36),
        "o": (4096, 4096, 36),
        "gate_up": (24576, 4096, 36),
        "down": (4096, 12288, 36),
        "lm_head": (151936, 4096, 1),
    },
    vocab_size=151936,
    num_layers=36,
    num_prompts=32,
)
SMOKE = Scale(
    device="cpu",
    dtypes=(torch.float16,),
    num_kv_heads=1,
    head_dim=32,
    groups=(2,),
    batch_sizes=(1, 2),
    context_lens=(20,),
    query_lens=(1, 3),
    block_size=16,
    linear_rows=(1, 3),
    linear_shapes={"o": (32, 64, 1)},
    vocab_size=70,
    num_layers=2,
    num_prompts=1,
)
