"""How long a device works on each stage of a step, and for how long on none.

Events stand between the stages of a host's step in the device's own order of work, so that nobody waits for it while it
is timed; what they say is read at the end. The gaps between kernels are the profiler's to see, and so are the stages of
the device's own rounds, which are one launch each: by the kernels that stand where a stage ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

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


class Span(NamedTuple):
    """When a device was at work on one kernel or copy, in microseconds."""

    begin: float
    end: float
    name: str = ""


class StageClock:
    """Milliseconds of the device by stage, of `with` blocks."""

    def __init__(self, make_event: Callable[[], Event] | None = None, wait: Callable[[], None] | None = None):
        self._make_event = make_event or (lambda: torch.cuda.Event(enable_timing=True))
        self._wait = wait or torch.cuda.synchronize
        self._pairs: dict[str, list[tuple[Event, Event]]] = defaultdict(list)

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


def device_spans(run: Callable[[], object]) -> list[Span]:
    """When a CUDA device was at work while something ran, and on what, by its profiler: replayed graphs as well."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    on_device = (event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA)
    return [Span(event.time_range.start, event.time_range.end, event.name) for event in on_device]


def round_milliseconds(spans: Iterable[Span]) -> dict[str, float]:
    """Of each stage of the device's own rounds, a round, with the gaps between its kernels: plan, draft (all passes),
    select (where that is done), target, settle. Rounds of which the profiler has seen a part are left out.

        plan kernel | pass  store kernel | pass  store kernel | select kernel | pass | settle kernel
        plan        | draft              | draft              | select        | target | settle
    """
    in_all: dict[str, float] = defaultdict(float)
    of_round: dict[str, float] = defaultdict(float)
    num_rounds, last = 0, None
    for begin, end, name in sorted(spans):
        if "_plan_kernel" in name:
            of_round.clear()
            of_round["plan"], last = end - begin, end
        elif last is None:
            continue
        elif "_store_drafts_kernel" in name or "_select_kernel" in name:
            of_round["select" if "_select_kernel" in name else "draft"] += end - last
            last = end
        elif "_settle_kernel" in name:
            of_round |= {"target": begin - last, "settle": end - begin}
            for stage, microseconds in of_round.items():
                in_all[stage] += microseconds
            num_rounds, last = num_rounds + 1, None
    return {stage: 1e-3 * microseconds / num_rounds for stage, microseconds in in_all.items()}


def idle_share(spans: Iterable[Span]) -> float | None:
    """Of the time from the first span's begin to the last one's end, the share that no span covers; None without any.

    Spans may overlap: of streams side by side the device is idle where all are.
    """
    busy, first, last = 0.0, None, None
    for begin, end, _ in sorted(spans):
        if last is None:
            first = last = begin
        busy += max(0.0, end - max(begin, last))
        last = max(last, end)
    if first is None or last <= first:
        return None
    return 1.0 - busy / (last - first)
