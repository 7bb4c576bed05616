"""Paged attention at decode and verify shapes, against the machine's bandwidth and its neighbours."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.device.neighbours import NEIGHBOURS
from benchmarks.device.pages import Pages, make_pages
from benchmarks.device.scale import Scale
from benchmarks.device.timing import Timer
from specpaged_kernels.paged_attention import paged_attention

CLOSE = 8.0  # how far a neighbour's output may lie from ours, in epsilons of the largest
DEADLINE = 240.0  # seconds into the section after which no neighbour is begun
CAPTURED = ("torch SDPA per sequence", "torch varlen, paged", "torch varlen, dense KV")  # known not to wait


def kv_bytes(pages: Pages) -> int:
    """That any attention has to read."""
    _, two, num_kv_heads, head_dim = pages.kv_pool.shape
    return sum(pages.lengths) * two * num_kv_heads * head_dim * pages.kv_pool.dtype.itemsize


def run(scale: Scale, timer: Timer | None) -> list[dict[str, Any]]:
    """One entry per (group, B, context, query tokens), in bfloat16 on a GPU."""
    dtype = torch.bfloat16 if scale.on_gpu else scale.dtypes[0]
    entries = []
    start = time.perf_counter()
    for group in scale.groups:
        for batch_size in scale.batch_sizes:
            for context_len in scale.context_lens:
                for query_len in scale.query_lens:
                    pages = make_pages(
                        [query_len] * batch_size, [context_len] * batch_size, num_kv_heads=scale.num_kv_heads,
                        group=group, head_dim=scale.head_dim, block_size=scale.block_size, dtype=dtype,
                        device=scale.device,
                    )  # fmt: skip
                    where = {"group": group, "B": batch_size, "context": context_len, "q_len": query_len}
                    late = time.perf_counter() - start > DEADLINE
                    entries.append(where | measure(pages, timer, () if late else tuple(NEIGHBOURS)))
    return entries


def measure(pages: Pages, timer: Timer | None, neighbours: Sequence[str]) -> dict[str, Any]:
    """Seconds of ours and of each neighbour that runs; why not, for the others."""
    output = torch.empty_like(pages.query)

    def ours() -> torch.Tensor:
        return paged_attention(*pages.arguments, output=output)

    expected = ours().float()
    entry: dict[str, Any] = {"kv_bytes": kv_bytes(pages), "neighbours": {}}
    if timer is not None:
        entry["ours"] = asdict(timer(ours))
    largest = expected.abs().max().item()
    for name, make in NEIGHBOURS.items():
        if name not in neighbours:
            entry["neighbours"][name] = {"refused": "skipped: the section has taken long enough"}
            continue
        try:
            call = make(pages)
            apart = (call().float().reshape(expected.shape) - expected).abs().max().item()
            result: dict[str, Any] = {"apart": apart}
            if apart > CLOSE * torch.finfo(pages.query.dtype).eps * largest:
                result["refused"] = f"its output lies {apart:.3g} from ours: it computes something else"
            elif timer is not None:
                result |= asdict(timer(call, capture=name in CAPTURED))
        except Exception as error:  # not installed, or not for this shape, device or version
            result = {"refused": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]}
        entry["neighbours"][name] = result
    return entry
