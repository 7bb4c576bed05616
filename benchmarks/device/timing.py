"""Device time of a call: median and spread, with a cold L2."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

FLUSH_BYTES = 512 << 20  # several times any L2; reading it takes longer than launching what is timed
MIN_SECONDS = 1e-7


@dataclass(frozen=True)
class Timing:
    """In seconds. `captured`: replayed as a CUDA graph, so that launching costs nothing."""

    median: float
    low: float  # 10th percentile
    high: float  # 90th percentile
    captured: bool


class Timer:
    """Times calls that only enqueue work on the current device."""

    def __init__(self, repeats: int = 20):
        self.repeats = repeats
        self._flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")

    def __call__(self, function: Callable[[], object], capture: bool = True) -> Timing:
        """Run `function` until it is compiled, capture it, and time it.

        What may wait for the device must not be captured: a capture that fails leaves torch's state spoiled.
        """
        run = _capture(function) if capture else _warm(function)
        seconds = []
        for _ in range(self.repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # Read, not written: dirty lines would be written back while the clock runs.
            self._flush.sum()
            begin.record()
            run()
            end.record()
            end.synchronize()
            seconds.append(max(MIN_SECONDS, begin.elapsed_time(end) / 1e3))
        ordered = sorted(seconds)
        tenth = len(ordered) // 10
        return Timing(statistics.median(ordered), ordered[tenth], ordered[-1 - tenth], capture)

    def copy_bandwidth(self, num_bytes: int = 2 << 30) -> float:
        """Bytes per second, read and written, of a device-to-device copy."""
        source = torch.randn(num_bytes // 4, dtype=torch.float32, device="cuda")
        target = torch.empty_like(source)
        return 2 * num_bytes / self(lambda: target.copy_(source)).median

    def read_bandwidth(self, num_bytes: int = 2 << 30) -> float:
        """Bytes per second of a sum: what a kernel that only reads, as attention does, may hope for."""
        source = torch.randn(num_bytes // 4, dtype=torch.float32, device="cuda")
        return num_bytes / self(lambda: source.sum()).median


def _warm(function: Callable[[], object]) -> Callable[[], object]:
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    return function


def _capture(function: Callable[[], object]) -> Callable[[], object]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        _warm(function)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay
