"""What rejecting drafts costs: the study's matrix of rollback methods, on the device's own scale."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console

from benchmarks.device.scale import Scale
from specpaged.studies import rollback as study
from specpaged.studies.kv_shape import KVShape


def shape(scale: Scale) -> KVShape:
    """One model's KV, in bfloat16 where that is real."""
    dtype = "bfloat16" if scale.on_gpu else "float32"
    return KVShape(scale.num_layers, scale.num_kv_heads, scale.head_dim, dtype)


def run(scale: Scale) -> dict[str, Any]:
    """Every rollback method by B, context and pattern: wall time, with the device's work done."""
    matrix = study.run(
        rollbacks=study.available_rollbacks(scale.device),
        batch_sizes=scale.batch_sizes,
        contexts=scale.context_lens[:2],
        shape=shape(scale),
        device=scale.device,
        threads=torch.get_num_threads(),
        out=None,
        progress=lambda label, total: lambda count: None,
    )
    return matrix.as_dict()


def print_table(entry: dict[str, Any], scale: Scale, console: Console) -> None:
    """Of what `run` returned."""
    study.result(entry["rows"], shape(scale), torch.get_num_threads(), scale.device).print(console)
