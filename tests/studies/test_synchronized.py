"""Shares of time on a device that works behind the host's back."""

import torch

from specpaged.studies.synchronized import waiting


def test_a_call_returns_when_the_device_has_done_its_work(monkeypatch):
    done = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append(device))
    call = waiting(lambda x, y: done.append((x, y)) or x + y, torch.device("cuda:1"))
    assert call(1, 2) == 3
    assert done == [(1, 2), torch.device("cuda:1")]
