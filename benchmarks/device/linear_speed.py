"""The exact linear against cuBLAS, on a forward pass's weights."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.device.scale import Scale
from benchmarks.device.timing import Timer
from specpaged_kernels.linear import linear


def run(scale: Scale, timer: Timer) -> list[dict[str, Any]]:
    """One entry per row count: each shape's seconds, ours and stock, and of all of a pass together."""
    weights = {
        name: torch.randn(n, k, dtype=torch.bfloat16, device=scale.device) / k**0.5
        for name, (n, k, _) in scale.linear_shapes.items()
    }
    entries = []
    for rows in scale.linear_rows:
        entry: dict[str, Any] = {"M": rows, "shapes": {}, "ours": 0.0, "stock": 0.0}
        for name, weight in weights.items():
            x = torch.randn(rows, weight.shape[1], dtype=torch.bfloat16, device=scale.device)
            ours, stock = timer(lambda x=x, w=weight: linear(x, w)), timer(lambda x=x, w=weight: F.linear(x, w))
            entry["shapes"][name] = {"ours": asdict(ours), "stock": asdict(stock)}
            count = scale.linear_shapes[name][2]
            entry["ours"] += count * ours.median
            entry["stock"] += count * stock.median
        entries.append(entry)
    return entries
