"""Paged attention in Triton: KV is read where it lies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from specpaged.modeling.attention.base import PagedPass
from specpaged.modeling.ragged_batch import RaggedBatch, upload
from specpaged_kernels.paged_attention import WorkList, choose_tiles, paged_attention, work_list_ref
from specpaged_kernels.store_kv import store_kv


class TritonPass(PagedPass):
    """A PagedPass in our Triton kernel. Bitwise exact: tiles and splits follow from a layer's geometry and dtype."""

    gathered_bytes = 0

    def __init__(self, batch: RaggedBatch, num_rows: int, kv_layers: Sequence[Tensor]):
        self.batch = batch
        self.num_rows = num_rows
        self.kv_layers = kv_layers
        self._num_stored = batch.cu_query_lens[-1:]
        self._work_lists: dict[tuple[int, int], WorkList] = {}  # by (query tokens of a program, split_len)

    def _work_list(self, tokens: int, split_len: int) -> WorkList:
        work_list = self._work_lists.get((tokens, split_len))
        if work_list is None:
            made = work_list_of(self.batch, tokens, split_len)
            device = self.batch.token_ids.device
            work_list = WorkList(upload(made.item_seq, device), upload(made.cu_items, device))
            self._work_lists[tokens, split_len] = work_list
        return work_list

    @override
    def attend(
        self,
        layer_idx: int,
        query: Tensor,  # [num_rows, Hq, D]
        key: Tensor,  # [num_rows, Hkv, D]
        value: Tensor,
        scaling: float | None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,  # [Hq]
    ) -> Tensor:
        batch, pool = self.batch, self.kv_layers[layer_idx]
        num_heads, head_dim = query.shape[1:]
        group = num_heads // key.shape[1]
        query, key, value = map(_with_dense_heads, (query, key, value))
        store_kv(key, value, pool, batch.slot_mapping, self._num_stored)
        tiles = choose_tiles(head_dim, group, query.dtype)
        return paged_attention(
            query,
            pool,
            batch.page_table,
            batch.cu_query_lens,
            batch.context_lens,
            batch.block_size,
            self._work_list(tiles.tokens(group), tiles.split_len),
            scaling,
            window,
            softcap,
            None if sinks is None else sinks.float(),
            block_stride=batch.block_stride,
        )


class StaticPass(TritonPass):
    """A pass that can be repeated for other batches: its work list is of one size, and brought up to date."""

    def __init__(self, batch: RaggedBatch, num_rows: int, kv_layers: Sequence[Tensor], num_items: int):
        super().__init__(batch, num_rows, kv_layers)
        device = batch.token_ids.device
        self._static = WorkList(
            *(torch.zeros(size, dtype=torch.int32, device=device) for size in (num_items, num_rows + 1))
        )

    def update(self, work_list: WorkList) -> None:
        """Do these items from now on: no more of them, and of no more sequences, than the pass was made for."""
        static = self._static
        ends = work_list.cu_items[-1:].expand(len(static.cu_items) - len(work_list.cu_items))
        values = upload(torch.cat([work_list.item_seq, work_list.cu_items, ends]), static.item_seq.device)
        item_seq, cu_items = values.split([len(work_list.item_seq), len(static.cu_items)])
        static.item_seq[: len(item_seq)].copy_(item_seq)
        static.cu_items.copy_(cu_items)

    @override
    def _work_list(self, tokens: int, split_len: int) -> WorkList:
        return self._static


class PackedPass(TritonPass):
    """A pass of a batch that was packed on the device, with the work list that came of it.

    A flat decoder's layers have one geometry, so that one list serves all of them.
    """

    def __init__(self, batch: RaggedBatch, num_rows: int, kv_layers: Sequence[Tensor], work_list: WorkList):
        super().__init__(batch, num_rows, kv_layers)
        self._packed = work_list

    @override
    def _work_list(self, tokens: int, split_len: int) -> WorkList:
        return self._packed


def work_list_of(batch: RaggedBatch, tokens: int, split_len: int) -> WorkList:
    """A batch's, on the host: from its copies of the lengths there, so that nothing waits for the device."""
    lengths = torch.tensor(batch.query_lens, dtype=torch.int32)
    bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)])
    return work_list_ref(bounds, torch.tensor(batch.context_lens_host), tokens, split_len)


def _with_dense_heads(x: Tensor) -> Tensor:
    """[N, H, D] with D contiguous, as the kernels want it; itself where it is so already."""
    return x if x.stride(-1) == 1 else x.contiguous()
