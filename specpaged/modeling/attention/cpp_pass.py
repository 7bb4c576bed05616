"""Paged attention in C++, on a CPU: KV is read where it lies."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from typing_extensions import override

from specpaged.modeling.attention.base import PagedPass
from specpaged.modeling.ragged_batch import RaggedBatch
from specpaged_kernels.cpu.paged_attention import paged_attention


class CppPass(PagedPass):
    """A PagedPass in our C++ kernel. Bitwise exact: a row's operations follow from its position alone."""

    gathered_bytes = 0

    def __init__(self, batch: RaggedBatch, kv_layers: Sequence[Tensor]):
        self.batch = batch
        self.kv_layers = kv_layers

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
        batch = self.batch
        return paged_attention(
            query,
            key,
            value,
            self.kv_layers[layer_idx],
            batch.slot_mapping,
            batch.page_table,
            batch.cu_query_lens,
            batch.context_lens,
            batch.block_size,
            scaling,
            window,
            softcap,
            None if sinks is None else sinks.float().contiguous(),
            block_stride=batch.block_stride,
        )
