"""The KV tensors of one model as a dense batch: one row per sequence."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from specpaged.paging.block_allocator import IntegrityError, check_positive
from specpaged.paging.kv_cache import KVCache, KVSpec
from specpaged_kernels.limits import MAX_BLOCK_SIZE


class DenseKVCache(KVCache):
    """num_rows rows of num_columns tokens, one row for each sequence of a batch.

    To a pass a row is one block without end, and blocks are one slot apart: a sequence's page table holds the slot of
    its position 0. So kernels read the rows where they lie, whatever column they begin in.
    """

    block_size = MAX_BLOCK_SIZE  # no position comes to a second block
    block_stride = 1

    def __init__(
        self, kv_spec: KVSpec, num_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device | str
    ):
        check_positive("num_rows", num_rows)
        check_positive("num_columns", num_columns)
        self.kv_spec = kv_spec
        self.num_rows = self.num_blocks = num_rows
        self.num_columns = num_columns
        self.dtype = dtype
        # Layers of one geometry together, [layers, R * C, 2, Hkv, D]: what moves a row moves it in all of them at once.
        self.stacks: list[Tensor] = []
        layers: dict[int, Tensor] = {}
        for geometry in dict.fromkeys(kv_spec.layers):
            members = [i for i, of_layer in enumerate(kv_spec.layers) if of_layer == geometry]
            shape = (len(members), num_rows * num_columns, 2, *geometry)
            self.stacks.append(torch.empty(shape, dtype=dtype, device=device))
            layers.update(zip(members, self.stacks[-1].unbind(), strict=True))
        self.layers = [layers[i] for i in range(len(kv_spec.layers))]  # each [R * C, 2, Hkv, D]

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor that holds KV, each once."""
        return list(self.stacks)

    @property
    @override
    def num_slots(self) -> int:
        return self.num_rows * self.num_columns

    @property
    @override
    def bytes_per_token(self) -> int:
        return self.kv_spec.num_elements * self.dtype.itemsize

    @property
    @override
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @override
    def check_integrity(self) -> None:
        """IntegrityError where a layer has been replaced by one of another shape."""
        for layer, geometry in zip(self.layers, self.kv_spec.layers, strict=True):
            expected = (self.num_slots, 2, *geometry)
            if tuple(layer.shape) != expected:
                raise IntegrityError(f"a layer has shape {tuple(layer.shape)}; allowed: {expected}")
