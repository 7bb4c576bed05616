"""Weights side by side in huge pages, where Linux gives them to who asks.

A pass of few rows reads every weight once. In pages of 4 KB each of them has an address to look up, in a virtual
machine by two trees of tables, and what is fetched ahead ends where the page does.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from specpaged.modeling.linear import CppKernel

HUGE_PAGE = 2**21  # bytes
CACHE_LINE = 64  # bytes


class HugePages:
    """Room for tensors of num_bytes in all, which lives as long as any of them; pages are taken as they are written."""

    def __init__(self, num_bytes: int):
        memory = mmap.mmap(-1, num_bytes + HUGE_PAGE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # of a Linux without them: these are pages like any others
                memory.madvise(mmap.MADV_HUGEPAGE)
        self._room = torch.frombuffer(memory, dtype=torch.uint8)
        self._start = -self._room.data_ptr() % HUGE_PAGE

    def copy_of(self, tensor: Tensor) -> Tensor:
        """The same values behind the last copy."""
        end = self._start + tensor.nbytes
        copy = self._room[self._start : end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        self._start = _aligned(end)
        return copy


def gather_weights(kernels: Sequence[CppKernel]) -> None:
    """Move the weights of the kernels to huge pages, in this order, if they fill one. One at a time is there twice."""
    num_bytes = sum(_aligned(kernel.weight.nbytes) for kernel in kernels)
    if num_bytes >= HUGE_PAGE:
        pages = HugePages(num_bytes)
        for kernel in kernels:
            kernel.weight = pages.copy_of(kernel.weight)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // CACHE_LINE) * CACHE_LINE
