"""How a pass is captured: on the model's own device, on a stream of that, and within what others have to put around."""

from __future__ import annotations

from contextlib import contextmanager

import torch

from specpaged.modeling.cuda_graphs import Recorder


class FakeCuda:
    """Says what is asked of torch.cuda, in order; the thread's own device is another one than the model's."""

    def __init__(self, monkeypatch):
        self.events: list[str] = []
        self.streams = iter("ab")
        for name in ("device", "Stream", "current_stream", "stream", "graph_pool_handle", "CUDAGraph", "graph"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    @contextmanager
    def _within(self, what):
        self.events.append(what)
        yield
        self.events.append(f"{what} ends")

    def device(self, device):
        return self._within(str(device))

    def stream(self, stream):
        return self._within(f"stream {stream.name}")

    def graph(self, graph, pool, stream, capture_error_mode):
        assert capture_error_mode == "thread_local"  # another lane may use the device meanwhile
        return self._within(f"capture on {stream.name} into {pool}")

    def Stream(self):
        cuda = self

        class FakeStream:
            def __init__(self, name):
                self.name = name

            def wait_stream(self, other):
                cuda.events.append(f"{self.name} waits for {other.name}")

        return FakeStream(next(self.streams, "current"))

    def current_stream(self):
        stream = self.Stream()
        stream.name = "current"
        return stream

    def graph_pool_handle(self):
        return "the pool"

    class CUDAGraph:
        def replay(self):
            return "replayed"


def test_a_pass_is_warmed_up_and_captured_on_a_stream_of_its_models_device(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    record = Recorder(torch.device("cuda:1"), lambda: cuda._within("around"))
    assert record(lambda: cuda.events.append("run"))() == "replayed"
    assert cuda.events == [
        "cuda:1", "around", "a waits for current",
        "stream a", "run", "stream a ends", "current waits for a",
        "capture on a into the pool", "run", "capture on a into the pool ends",
        "around ends", "cuda:1 ends",
    ]  # fmt: skip
