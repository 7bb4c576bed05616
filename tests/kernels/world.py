"""Ragged batches for kernel tests: pages in random places, NaN wherever nothing is owned."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class World:
    query: Tensor
    kv_pool: Tensor
    page_table: Tensor
    cu_query_lens: Tensor
    context_lens: Tensor
    block_size: int

    @property
    def arguments(self) -> tuple:
        return self.query, self.kv_pool, self.page_table, self.cu_query_lens, self.context_lens, self.block_size


def make_world(
    query_lens: list[int],
    context_lens: list[int],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    filler: int = 0,
    seed: int = 0,
) -> World:
    """Sequences whose contexts and new tokens are in the pool; every other slot, and each filler row, is NaN."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [q + c for q, c in zip(query_lens, context_lens, strict=True)]
    num_blocks = [-(-length // block_size) for length in lengths]
    free = (torch.randperm(sum(num_blocks) + 3, generator=generator) + 1).tolist()
    num_slots = (len(free) + 1) * block_size
    kv_pool = torch.full((num_slots, 2, num_kv_heads, head_dim), float("nan"), dtype=dtype)
    page_table = torch.zeros(len(lengths), max(num_blocks), dtype=torch.int32)
    for b, length in enumerate(lengths):
        blocks = [free.pop() for _ in range(num_blocks[b])]
        page_table[b, : len(blocks)] = torch.tensor(blocks)
        slots = [blocks[p // block_size] * block_size + p % block_size for p in range(length)]
        kv_pool[slots] = torch.randn(length, 2, num_kv_heads, head_dim, generator=generator).to(dtype)
    num_tokens = sum(query_lens)
    query = torch.full((num_tokens + filler, num_heads, head_dim), float("nan"), dtype=dtype)
    query[:num_tokens] = torch.randn(num_tokens, num_heads, head_dim, generator=generator).to(dtype)
    cu_query_lens = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    return World(query, kv_pool, page_table, cu_query_lens, torch.tensor(context_lens, dtype=torch.int32), block_size)
