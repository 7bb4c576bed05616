"""Which of a machine's devices a worker takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from specpaged.vllm_plugin import ranks, worker
from specpaged.vllm_plugin.worker import SpecPagedWorker


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        ({}, 1),
        ({"data_parallel_rank_local": 2}, 5),
        ({"data_parallel_index": 1}, 3),
        ({"data_parallel_index": 1, "distributed_executor_backend": "ray"}, 1),
        ({"data_parallel_index": 1, "nnodes_within_dp": 2}, 1),
        ({"assigned_physical_gpu_ids": [6, 7]}, 7),
    ],
    ids=str,
)
def test_ranks_engines_and_named_devices_are_told_apart(monkeypatch, parallel, expected):
    """Rank 1 of an engine of two ranks."""
    named = []
    monkeypatch.setattr(worker, "set_assigned_physical_gpu_ids", named.extend)
    defaults = {
        "distributed_executor_backend": "mp",
        "data_parallel_backend": "mp",
        "nnodes_within_dp": 1,
        "data_parallel_rank_local": None,
        "data_parallel_index": 0,
        "tensor_parallel_size": 2,
        "assigned_physical_gpu_ids": None,
    }
    ours = SpecPagedWorker.__new__(SpecPagedWorker)
    ours.local_rank = 1
    ours.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(**(defaults | parallel)))
    ours.current_platform = SimpleNamespace(
        logical_device_id_to_visible_device_id=lambda rank: named[rank] if named else rank
    )
    assert ours._device_index() == expected


def test_what_ranks_capture_has_their_collectives_heed_it(monkeypatch):
    """On a GPU a capture is within vLLM's own `graph_capture` of that device, and ranks agree over the host."""
    recorders, gathers = [], []
    group = SimpleNamespace(cpu_group="the host's")
    monkeypatch.setattr(ranks, "get_tp_group", lambda: group)
    monkeypatch.setattr(ranks, "graph_capture", lambda device: f"within the capture of {device}")
    monkeypatch.setattr(ranks, "gathered", lambda group, values: gathers.append(group) or values)
    monkeypatch.setattr(ranks, "Recorder", lambda device, around: recorders.append((device, around)) or "record")
    record, agreement = ranks.get_captures(torch.device("cuda", 1))
    assert record == "record"
    ((device, around),) = recorders
    assert device == torch.device("cuda", 1)
    assert around() == "within the capture of cuda:1"
    assert agreement.all_have(True)
    assert gathers == ["the host's"]
    assert ranks.get_captures(torch.device("cpu"))[0] is None
