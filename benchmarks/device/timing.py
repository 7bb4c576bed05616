"""Device time of a call: median and spread, with a cold L2."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

FLUSH_BYTES = 512 << 20  # several times any L2; writing it takes longer than launching what is timed
MIN_SECONDS = 1e-7


@dataclass(frozen=True)
class Timing:
    """In seconds. `captured`: as a CUDA graph, so that launching costs nothing."""

    median: float
    low: float  # 10th percentile
    high: float  # 90th percentile
    captured: bool


class Timer:
    """Times calls that only enqueue work on the current device."""

    def __init__(self, repeats: int = 20):
        self.repeats = repeats
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def __call__(self, function: Callable[[], object]) -> Timing:
        """Run `function` until it is compiled, capture it where it lets itself be captured, and time it."""
        run, captured = _capture(function)
        seconds = []
        for _ in range(self.repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush.zero_()
            begin.record()
            run()
            end.record()
            end.synchronize()
            seconds.append(max(MIN_SECONDS, begin.elapsed_time(end) / 1e3))
        ordered = sorted(seconds)
        tenth = len(ordered) // 10
        return Timing(statistics.median(ordered), ordered[tenth], ordered[-1 - tenth], captured)

    def copy_bandwidth(self, num_bytes: int = 2 << 30) -> float:
        """Bytes per second, read and written, of a device-to-device copy."""
        source = torch.empty(num_bytes, dtype=torch.int8, device="cuda")
        target = torch.empty_like(source)
        return 2 * num_bytes / self(lambda: target.copy_(source)).median

    def read_bandwidth(self, num_bytes: int = 2 << 30) -> float:
        """Bytes per second of a sum: what a kernel that only reads, as attention does, may hope for."""
        source = torch.zeros(num_bytes // 4, dtype=torch.float32, device="cuda")
        return num_bytes / self(lambda: source.sum()).median


def _capture(function: Callable[[], object]) -> tuple[Callable[[], object], bool]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            function()
    except RuntimeError:  # it waits for the device, or allocates outside torch
        torch.cuda.synchronize()
        return function, False
    return graph.replay, True
