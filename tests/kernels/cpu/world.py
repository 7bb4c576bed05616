"""A pool that holds some sequences' contexts in shuffled blocks, and a ragged pass on top of them."""

from __future__ import annotations

import torch

from specpaged_kernels.cpu.paged_attention import paged_attention


class World:
    """NaN in all slots but those of the contexts and of the null block; filler rows hold NaN, too."""

    def __init__(
        self,
        batch: list[tuple[int, int]],  # (context, query tokens) of each sequence
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        filler: int = 3,
        kv_dtype: torch.dtype | None = None,  # of the pool; default: dtype
    ):
        generator = torch.Generator().manual_seed(seed)
        self.block_size = block_size
        lengths = [context + query_len for context, query_len in batch]
        num_blocks = sum(-(-length // block_size) for length in lengths) + 3
        free = (torch.randperm(num_blocks, generator=generator) + 1).tolist()
        self.blocks = [[free.pop() for _ in range(-(-length // block_size))] for length in lengths]
        self.page_table = torch.zeros(len(batch), max(1, *map(len, self.blocks)), dtype=torch.int32)
        for row, blocks in zip(self.page_table, self.blocks, strict=True):
            row[: len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        slots = []
        kv_dtype = kv_dtype or dtype
        self.pool = torch.full(((num_blocks + 1) * block_size, 2, num_kv_heads, head_dim), float("nan"), dtype=kv_dtype)
        self.pool[:block_size] = 0
        for seq, (context, query_len) in enumerate(batch):
            owned = [self.slot(seq, position) for position in range(context)]
            self.pool[owned] = torch.randn(len(owned), 2, num_kv_heads, head_dim, generator=generator).to(kv_dtype)
            slots += [self.slot(seq, position) for position in range(context, context + query_len)]
        self.slot_mapping = torch.tensor(slots, dtype=torch.int64)
        self.num_tokens = len(slots)
        bounds = [0, *torch.tensor([query_len for _, query_len in batch]).cumsum(0).tolist()]
        self.cu_query_lens = torch.tensor(bounds, dtype=torch.int32)
        self.context_lens = torch.tensor([context for context, _ in batch], dtype=torch.int32)
        qkv = torch.randn(self.num_tokens + filler, num_heads + 2 * num_kv_heads, head_dim, generator=generator)
        qkv[self.num_tokens :] = float("nan")
        # As a projection hands them over: side by side.
        self.query, self.key, self.value = qkv.to(dtype).split([num_heads, num_kv_heads, num_kv_heads], dim=1)

    def slot(self, seq: int, position: int) -> int:
        return self.blocks[seq][position // self.block_size] * self.block_size + position % self.block_size

    def copy_sequence(self, other: World, start: int, stop: int) -> None:
        """Make the last sequence the first one of `other`, whose context is empty: its tokens start .. stop - 1 run."""
        rows = slice(self.num_tokens - (stop - start), self.num_tokens)
        for name in ("query", "key", "value"):
            getattr(self, name)[rows] = getattr(other, name)[start:stop]
        for position in range(start):
            slot = self.slot(len(self.blocks) - 1, position)
            self.pool[slot, 0], self.pool[slot, 1] = other.key[position], other.value[position]

    def attend(self, **options) -> torch.Tensor:
        return paged_attention(
            self.query, self.key, self.value, self.pool, self.slot_mapping, self.page_table, self.cu_query_lens,
            self.context_lens, self.block_size, **options,
        )  # fmt: skip
