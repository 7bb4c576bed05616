"""How long a device works on each stage of a step, and for how long on none.

Events stand between the stages in the device's own order of work, so that nobody waits for it while it is timed; what
they say is read at the end. The gaps between kernels are the profiler's to see.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from specpaged.metrics import EngineMetrics
from specpaged.modeling.copies import Copies, Reading


class Event(Protocol):
    """A torch.cuda.Event(enable_timing=True), or what stands for one."""

    def record(self) -> None:
        """The device has come here when it has done all that was launched before."""
        ...

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from here to another one."""
        ...


class StageClock:
    """Milliseconds of the device by stage: of `with` blocks, or from one mark to the next."""

    def __init__(self, make_event: Callable[[], Event] | None = None, wait: Callable[[], None] | None = None):
        self._make_event = make_event or (lambda: torch.cuda.Event(enable_timing=True))
        self._wait = wait or torch.cuda.synchronize
        self._pairs: dict[str, list[tuple[Event, Event]]] = defaultdict(list)
        self._last: Event | None = None

    def watch(self, metrics: EngineMetrics) -> None:
        """Time the stages that these metrics time on the host, too."""
        on_host = metrics.stage

        @contextmanager
        def on_both(name: str) -> Iterator[None]:
            begin = self._now()
            with on_host(name):
                yield
            self._pairs[name].append((begin, self._now()))

        metrics.stage = on_both

    def begin(self) -> None:
        """The first stage of those that are marked begins."""
        self._last = self._now()

    def mark(self, stage: str) -> None:
        """A stage ends, and the next one begins."""
        now = self._now()
        if self._last is None:
            raise RuntimeError(f"stage {stage!r} was marked before the clock began")
        self._pairs[stage].append((self._last, now))
        self._last = now

    def milliseconds(self, num_steps: int) -> dict[str, float]:
        """Of each stage, a step; waits for the device once."""
        self._wait()
        return {
            stage: sum(begin.elapsed_time(end) for begin, end in pairs) / num_steps
            for stage, pairs in self._pairs.items()
        }

    def _now(self) -> Event:
        event = self._make_event()
        event.record()
        return event


class TimedCopies(Copies):
    """Another's copies, and the seconds that their owner has waited for them."""

    def __init__(self, copies: Copies, clock: Callable[[], float]):
        self.copies = copies
        self.clock = clock
        self.seconds = 0.0

    def upload(self, values: torch.Tensor) -> torch.Tensor:
        """As the other does."""
        return self.copies.upload(values)

    def read(self, source: torch.Tensor) -> Reading:
        """As the other does, but for the clock."""
        return _TimedReading(self, self.copies.read(source))


class _TimedReading(Reading):
    def __init__(self, owner: TimedCopies, reading: Reading):
        self._owner, self._reading = owner, reading

    def values(self) -> torch.Tensor:
        start = self._owner.clock()
        try:
            return self._reading.values()
        finally:
            self._owner.seconds += self._owner.clock() - start


def device_spans(run: Callable[[], object]) -> list[tuple[float, float]]:
    """When a CUDA device was at work while something ran, by its profiler: begin and end of each kernel and copy."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    on_device = (event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA)
    return [(event.time_range.start, event.time_range.end) for event in on_device]


def idle_share(spans: Iterable[tuple[float, float]]) -> float | None:
    """Of the time from the first span's begin to the last one's end, the share that no span covers; None without any.

    Spans may overlap: of streams side by side the device is idle where all are.
    """
    busy, first, last = 0.0, None, None
    for begin, end in sorted(spans):
        if last is None:
            first = last = begin
        busy += max(0.0, end - max(begin, last))
        last = max(last, end)
    if first is None or last <= first:
        return None
    return 1.0 - busy / (last - first)
