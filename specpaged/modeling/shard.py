"""Tensor parallelism whose bits are those of one device: every matrix is split by its outputs, never by its sums.

The usual way splits the second matrix of a pair by its inputs and adds up what the ranks get: another order of
summation for each number of ranks. Here each rank computes some outputs of every matrix over all of its inputs, and
what the ranks have is gathered: twice as often, and bit for bit what one device computes, where a product's outputs do
not depend on their neighbours (our own kernels; torch's choose by shape).

    rank 0   norm -> q k v of its heads   -> attention -\\            -> o's first half  -\\            -> gate, up ...
    rank 1   norm -> q k v of its heads   -> attention --> all heads -> o's second half --> all of H -> gate, up ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from specpaged.modeling.flat.config import FlatConfig


@dataclass(frozen=True)
class Shard:
    """One rank's part of a model."""

    rank: int
    size: int
    all_gather: Callable[[Tensor], Tensor]  # [N, C] of each rank -> [N, size * C], in the order of ranks

    def check(self, config: FlatConfig) -> str | None:
        """Why a model cannot be split so; None if it can."""
        for name in ("num_heads", "num_kv_heads", "intermediate_size", "hidden_size"):
            if getattr(config, name) % self.size:
                return f"its {name}={getattr(config, name)} cannot be split over {self.size} ranks"
        return None

    def of(self, config: FlatConfig) -> FlatConfig:
        """The configuration of what this rank computes between two gatherings."""
        parts = ("num_heads", "num_kv_heads", "intermediate_size")
        return replace(config, **{name: getattr(config, name) // self.size for name in parts})

    def rows(self, tensor: Tensor) -> Tensor:
        """This rank's part of a matrix's outputs (or of a bias): [C, ...] -> [C / size, ...]."""
        return tensor.chunk(self.size)[self.rank]

    def groups(self, tensor: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """This rank's part of each of several matrices, of `sizes` outputs, that lie one above the other."""
        return torch.cat([self.rows(part) for part in tensor.split(sizes)])


def gathered(group: torch.distributed.ProcessGroup, x: Tensor) -> Tensor:
    """[..., N] of each rank -> [..., ranks * N] of all, by torch's own collective."""
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(group.size())]
    torch.distributed.all_gather(parts, x, group=group)
    return torch.cat(parts, dim=-1)


class GatheredLinear(nn.Module):
    """A matrix of which every rank has some outputs: [N, part of inputs] -> [N, all outputs]."""

    def __init__(self, linear: nn.Module, shard: Shard):
        super().__init__()
        self.linear = linear
        self.shard = shard

    def forward(self, x: Tensor) -> Tensor:
        """x [N, inputs / size] of this rank -> [N, outputs] of all ranks."""
        return self.shard.all_gather(self.linear(self.shard.all_gather(x)))
