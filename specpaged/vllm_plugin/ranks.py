"""What a rank of vLLM's tensor parallelism has of a target, and what it does together with the others."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

import torch
from vllm.distributed import ensure_model_parallel_initialized, get_tp_group, init_distributed_environment
from vllm.distributed.parallel_state import graph_capture

from specpaged.modeling.cuda_graphs import Recorder
from specpaged.modeling.rank_agreement import RankAgreement
from specpaged.modeling.shard import Shard, gathered

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

    from specpaged.modeling.cuda_graphs import Record


def get_shard(
    parallel: ParallelConfig, rank: int, local_rank: int, init_method: str, backend: str, device: torch.device
) -> Shard | None:
    """This rank's part of the target, under tensor parallelism: vLLM's groups gather what the ranks compute."""
    if parallel.tensor_parallel_size == 1:
        return None
    # Names the shared memory of vLLM's CPU communicator.
    os.environ.setdefault("VLLM_DIST_IDENT", init_method.rsplit(":")[-1].rsplit("/")[-1])
    init_distributed_environment(parallel.world_size, rank, init_method, local_rank, backend)
    ensure_model_parallel_initialized(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    group = get_tp_group()
    # vLLM's own gather in shared memory, which it has on CPUs with AVX-512, divides by zero (0.32).
    all_gather = partial(gathered, group.cpu_group) if device.type == "cpu" else group.all_gather
    return Shard(group.rank_in_group, group.world_size, all_gather)


def get_captures(device: torch.device) -> tuple[Record | None, RankAgreement]:
    """How a pass is captured with vLLM's gathers in it, and what ranks agree on then.

    vLLM has its communicators heed captures within `graph_capture`.
    """
    record = Recorder(device, partial(graph_capture, device)) if device.type == "cuda" else None
    return record, RankAgreement(partial(gathered, get_tp_group().cpu_group))
