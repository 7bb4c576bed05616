"""Paged attention in Triton: KV is read where it lies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specpaged.batch import RaggedBatch, upload
from specpaged_kernels.paged_attention import WorkList, choose_tiles, paged_attention, work_list_ref
from specpaged_kernels.store_kv import store_kv


class TritonPass:
    """See PagedPass. Bitwise exact by construction: tiles and splits follow from the layer's geometry and dtype."""

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
        """See PagedPass.attend."""
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
        )


class StaticPass(TritonPass):
    """A pass that can be repeated for other batches: its work lists are tensors of one size, brought up to date."""

    def __init__(self, batch: RaggedBatch, num_rows: int, kv_layers: Sequence[Tensor], longest: int):
        super().__init__(batch, num_rows, kv_layers)
        self.longest = longest  # tokens of a sequence, those of the pass included
        self._current = batch

    def update(self, batch: RaggedBatch) -> None:
        """Be of this batch from now on: of no more rows, and with no longer sequence, than the pass was made for."""
        self._current = batch
        for (tokens, split_len), work_list in self._work_lists.items():
            self._fill(work_list, tokens, split_len)

    def _work_list(self, tokens: int, split_len: int) -> WorkList:
        work_list = self._work_lists.get((tokens, split_len))
        if work_list is None:
            # A row is an item for each split of its sequence, if no other shares its query block.
            most, device = self.num_rows * -(-self.longest // split_len), self.batch.token_ids.device
            item_seq, cu_items = (
                torch.zeros(size, dtype=torch.int32, device=device) for size in (most, self.num_rows + 1)
            )
            work_list = self._work_lists[tokens, split_len] = WorkList(item_seq, cu_items)
            self._fill(work_list, tokens, split_len)
        return work_list

    def _fill(self, work_list: WorkList, tokens: int, split_len: int) -> None:
        made = work_list_of(self._current, tokens, split_len)
        ends = made.cu_items[-1:].expand(len(work_list.cu_items) - len(made.cu_items))
        values = upload(torch.cat([made.item_seq, made.cu_items, ends]), work_list.item_seq.device)
        item_seq, cu_items = values.split([len(made.item_seq), len(work_list.cu_items)])
        work_list.item_seq[: len(item_seq)].copy_(item_seq)
        work_list.cu_items.copy_(cu_items)


def work_list_of(batch: RaggedBatch, tokens: int, split_len: int) -> WorkList:
    """A batch's, on the host: from its copies of the lengths there, so that nothing waits for the device."""
    lengths = torch.tensor(batch.query_lens, dtype=torch.int32)
    bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)])
    return work_list_ref(bounds, torch.tensor(batch.context_lens_host), tokens, split_len)


def _with_dense_heads(x: Tensor) -> Tensor:
    """[N, H, D] with D contiguous, as the kernels want it; itself where it is so already."""
    return x if x.stride(-1) == 1 else x.contiguous()
