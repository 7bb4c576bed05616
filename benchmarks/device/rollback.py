"""What rejecting drafts costs: truncation, our kernel for dense realignment, and the same in plain torch."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from benchmarks.device.scale import Scale
from benchmarks.device.timing import Timer
from specpaged.paging.block_allocator import BlockAllocator
from specpaged.paging.page_table import TARGET, PageTable
from specpaged_kernels.realign import realign

NUM_DRAFTS = 5


def run(scale: Scale, timer: Timer) -> list[dict[str, Any]]:
    """One entry per (B, context): seconds of a round's rollback, all layers, and the bytes that it moves.

    Truncation is host time, and all of it; the dense ways are device time with a cold L2, without launching.
    """
    entries = []
    for batch_size in scale.batch_sizes:
        for context_len in scale.context_lens[:2]:
            entry: dict[str, Any] = {"B": batch_size, "context": context_len}
            entry["truncate"] = {"seconds": truncate_seconds(batch_size, context_len, scale.block_size), "bytes": 0}
            entry |= _dense(scale, timer, batch_size, context_len)
            entries.append(entry)
    return entries


def num_rejected(batch_size: int) -> list[int]:
    """Of NUM_DRAFTS drafts: 1, 2, .. NUM_DRAFTS, 1, .."""
    return [1 + b % NUM_DRAFTS for b in range(batch_size)]


def truncate_seconds(batch_size: int, context_len: int, block_size: int, rounds: int = 200) -> float:
    """Median wall time, on the host, of truncating every sequence's page table behind what it keeps."""
    written = context_len + NUM_DRAFTS + 1
    allocator = BlockAllocator(batch_size * -(-written // block_size))
    tables = [PageTable(allocator, block_size, 1) for _ in range(batch_size)]
    kept = [written - rejected for rejected in num_rejected(batch_size)]
    seconds = []
    for _ in range(rounds):
        for table in tables:
            table.reserve(written)
            table.advance(TARGET, written - table.context_lens[TARGET])
        start = time.perf_counter()
        for table, num_tokens in zip(tables, kept, strict=True):
            table.truncate(TARGET, num_tokens)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _dense(scale: Scale, timer: Timer, batch_size: int, context_len: int) -> dict[str, Any]:
    """Left-padded KV of one layer moved to its new offsets, times the layers."""
    width = context_len + NUM_DRAFTS + 1
    cache = torch.randn(
        batch_size, scale.num_kv_heads, width, scale.head_dim, dtype=torch.bfloat16, device=scale.device
    )
    rejected = num_rejected(batch_size)
    starts = torch.zeros(batch_size, dtype=torch.int32, device=scale.device)
    lengths = torch.tensor([width - r for r in rejected], dtype=torch.int32, device=scale.device)
    new_length = width - min(rejected)

    def repad() -> torch.Tensor:
        moved = cache.new_zeros(batch_size, scale.num_kv_heads, new_length, scale.head_dim)
        for b, r in enumerate(rejected):
            moved[b, :, new_length - (width - r) :] = cache[b, :, : width - r]
        return moved

    tensors = 2 * scale.num_layers  # keys and values
    num_bytes = 2 * cache[:, :, :new_length].numel() * cache.dtype.itemsize * tensors
    kernel = timer(lambda: realign(cache, starts, lengths, new_length)).median * tensors
    stock = timer(repad).median * tensors
    return {
        "realign": {"seconds": kernel, "bytes": num_bytes},
        "torch repad": {"seconds": stock, "bytes": num_bytes},
    }
