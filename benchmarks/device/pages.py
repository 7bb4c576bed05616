"""Random ragged batches on paged KV, for the sections that run attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specpaged_kernels.paged_attention import WorkList, choose_tiles, work_list_ref


@dataclass(frozen=True)
class Pages:
    """Arguments of paged_attention, in the names of its signature."""

    query: Tensor  # [N, Hq, D]
    kv_pool: Tensor  # [P * S, 2, Hkv, D]
    page_table: Tensor  # [B, max_blocks] int32
    cu_query_lens: Tensor  # [B + 1] int32
    context_lens: Tensor  # [B] int32
    block_size: int
    work_list: WorkList

    @property
    def arguments(self) -> tuple:
        """In order."""
        return (
            self.query,
            self.kv_pool,
            self.page_table,
            self.cu_query_lens,
            self.context_lens,
            self.block_size,
            self.work_list,
        )

    @property
    def lengths(self) -> list[int]:
        """Of KV, new tokens included."""
        query_lens = self.cu_query_lens.diff()
        return (self.context_lens + query_lens).tolist()

    def dense(self, b: int) -> tuple[Tensor, Tensor]:
        """Keys and values of sequence b, [L, Hkv, D] each."""
        positions = torch.arange(self.lengths[b], device=self.query.device)
        blocks = self.page_table[b].long()[positions // self.block_size]
        gathered = self.kv_pool[blocks * self.block_size + positions % self.block_size]
        return gathered[:, 0], gathered[:, 1]


def make_pages(
    query_lens: list[int],
    context_lens: list[int],
    *,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: str,
) -> Pages:
    """Blocks in random places; block 0 is nobody's."""
    generator = torch.Generator(device=device).manual_seed(0)
    num_blocks = [-(-(q + c) // block_size) for q, c in zip(query_lens, context_lens, strict=True)]
    shuffled = torch.randperm(sum(num_blocks), generator=generator, device=device).to(torch.int32) + 1
    page_table = torch.zeros(len(query_lens), max(num_blocks), dtype=torch.int32, device=device)
    for b, blocks in enumerate(shuffled.split(num_blocks)):
        page_table[b, : len(blocks)] = blocks
    shape = ((sum(num_blocks) + 1) * block_size, 2, num_kv_heads, head_dim)
    kv_pool = torch.randn(shape, generator=generator, device=device, dtype=dtype)
    query = torch.randn(
        sum(query_lens), group * num_kv_heads, head_dim, generator=generator, device=device, dtype=dtype
    )
    cu_query_lens = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    contexts = torch.tensor(context_lens, dtype=torch.int32)
    tiles = choose_tiles(head_dim, group, dtype)
    work_list = work_list_ref(cu_query_lens, contexts, tiles.tokens(group), tiles.split_len)
    return Pages(
        query,
        kv_pool,
        page_table,
        cu_query_lens.to(device),
        contexts.to(device),
        block_size,
        WorkList(work_list.item_seq.to(device), work_list.cu_items.to(device)),
    )
