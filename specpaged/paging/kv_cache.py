"""The KV tensors of one model, indexed by slot = block * block_size + offset."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from specpaged.paging.block_allocator import NULL_BLOCK, IntegrityError, check_positive


@dataclass(frozen=True)
class KVSpec:
    """What one token's KV consists of."""

    layers: tuple[tuple[int, int], ...]  # per layer (num_kv_heads, head_dim)

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError(f"layers must name at least one layer, got {self.layers!r}")
        for num_kv_heads, head_dim in self.layers:
            check_positive("num_kv_heads", num_kv_heads)
            check_positive("head_dim", head_dim)

    @property
    def num_elements(self) -> int:
        """Elements of one token's keys and values, summed over all layers."""
        return sum(2 * num_kv_heads * head_dim for num_kv_heads, head_dim in self.layers)


class KVCache(Protocol):
    """The KV tensors of one model, whatever their layout: what a ModelRunner reads and writes."""

    kv_spec: KVSpec
    layers: list[Tensor]  # per layer [slots, 2, Hkv, D]; [:, 0] keys, [:, 1] values
    num_blocks: int
    block_size: int  # tokens of a block
    block_stride: int  # slots from a block to the next one

    @property
    def num_slots(self) -> int:
        """Tokens that there is room for."""
        ...

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's KV in all layers."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors."""
        ...

    def check_integrity(self) -> None:
        """IntegrityError where the tensors are not as the layout has them."""
        ...


class PagedKVCache(KVCache):
    """num_blocks blocks, and the null block, which is zeros and never written.

    The rest is uninitialised: a slot may be read only after it has been written.
    """

    def __init__(
        self,
        kv_spec: KVSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        check_positive("num_blocks", num_blocks)
        check_positive("block_size", block_size)
        if not dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating point dtype, got {dtype}")
        self.kv_spec = kv_spec
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        # Per layer [(num_blocks + 1) * S, 2, Hkv, D] dtype; [:, 0] keys, [:, 1] values.
        self.layers: list[Tensor] = []
        for num_kv_heads, head_dim in kv_spec.layers:
            shape = ((num_blocks + 1) * block_size, 2, num_kv_heads, head_dim)
            layer = torch.empty(shape, dtype=dtype, device=device)
            layer[:block_size].zero_()
            self.layers.append(layer)

    @property
    @override
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def block_stride(self) -> int:
        return self.block_size

    @property
    @override
    def bytes_per_token(self) -> int:
        return self.kv_spec.num_elements * self.dtype.itemsize

    @property
    @override
    def num_bytes(self) -> int:
        """Bytes of the tensors, the null block included."""
        return (self.num_blocks + 1) * self.block_size * self.bytes_per_token

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> int:
        """Copy whole blocks, (source, destination) each, in every layer. Returns the bytes copied.

        All sources are read before any destination is written.
        """
        if not pairs:
            return 0
        for pair in pairs:
            for block in pair:
                if not NULL_BLOCK < block <= self.num_blocks:
                    raise ValueError(f"pairs must name blocks in 1..{self.num_blocks}, got {pair}")
        if len({destination for _, destination in pairs}) != len(pairs):
            raise ValueError(f"pairs must not name a destination twice, got {list(pairs)}")
        # Each [len(pairs)] int64.
        idx = torch.tensor(list(pairs), dtype=torch.int64, device=self.layers[0].device)
        source_idx, destination_idx = idx.unbind(1)
        for layer in self.layers:
            blocks = layer.view(self.num_blocks + 1, self.block_size, *layer.shape[1:])
            blocks[destination_idx] = blocks[source_idx]
        return len(pairs) * self.block_size * self.bytes_per_token

    @override
    def check_integrity(self) -> None:
        """IntegrityError unless the null block is zeros in every layer, and every layer has its shape."""
        for layer, (num_kv_heads, head_dim) in zip(self.layers, self.kv_spec.layers, strict=True):
            expected = ((self.num_blocks + 1) * self.block_size, 2, num_kv_heads, head_dim)
            if tuple(layer.shape) != expected:
                raise IntegrityError(f"a layer has shape {tuple(layer.shape)}; allowed: {expected}")
            if layer[: self.block_size].any():  # NaN is not zero either
                raise IntegrityError("the null block was written to")

    def fill_unowned(self, owned_slots: Iterable[int], value: float = math.nan) -> None:
        """Test helper: overwrite every slot that is neither in the null block nor in owned_slots.

        Whoever reads one of them then finds `value` in the result.
        """
        num_slots = (self.num_blocks + 1) * self.block_size
        owned = [int(slot) for slot in owned_slots]
        if owned and not 0 <= min(owned) <= max(owned) < num_slots:
            raise ValueError(f"owned_slots must be in 0..{num_slots - 1}, got {min(owned)}..{max(owned)}")
        mask = torch.ones(num_slots, dtype=torch.bool)  # [(num_blocks + 1) * S] bool
        mask[: self.block_size] = False
        mask[owned] = False
        unowned = mask.nonzero().squeeze(1)
        for layer in self.layers:
            layer[unowned.to(layer.device)] = torch.tensor(value).to(layer)
