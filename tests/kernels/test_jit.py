"""Where a kernel is launched."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from specpaged_kernels.jit import on_its_device


@pytest.mark.parametrize(("index", "entered"), [(0, []), (1, ["cuda:1"])])
def test_a_kernel_runs_on_the_device_of_its_arguments_whatever_the_threads_own(monkeypatch, index, entered):
    """The thread is on cuda:0; nothing is done where that is right."""
    devices, launches = [], []

    @contextmanager
    def on(device):
        devices.append(str(device))
        yield
        devices.append("left")

    def run(tensor, *args, **named):
        launches.append((tensor, args, named, list(devices)))
        return "launched"

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", on)
    tensor = SimpleNamespace(device=torch.device("cuda", index))
    assert on_its_device(run)(tensor, 7, grid=(1,), warmup=False) == "launched"
    assert launches == [(tensor, (7,), {"grid": (1,), "warmup": False}, entered)]
    assert devices == entered + ["left"] * bool(entered)
