"""What the loop's clock adds up, by the events of a device that is none."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.device.stage_clock import Span, StageClock, TimedCopies, idle_share, round_milliseconds
from specpaged.metrics import EngineMetrics
from specpaged.modeling.copies import Copies
from specpaged_kernels import decoding_round, select_drafts


class FakeDevice:
    """Time goes on as it is told to; an event notes it when the device has waited for all, and not before."""

    def __init__(self):
        self.now = 0.0
        self.waited = False

    def event(self):
        device = self

        class FakeEvent:
            def record(self):
                self.at = device.now

            def elapsed_time(self, end):
                assert device.waited, "somebody asked what is not there yet"
                return end.at - self.at

        return FakeEvent()

    def wait(self):
        self.waited = True


def test_stages_are_what_lies_between_their_events():
    """Two steps, of which the second has no drafts; the host's time is counted as well."""
    device = FakeDevice()
    clock, metrics = StageClock(device.event, device.wait), EngineMetrics()
    clock.watch(metrics)
    for score, propose in ((5.0, 3.0), (4.0, 0.0)):
        with metrics.stage("score"):
            device.now += score
        device.now += 100.0  # of no stage
        with metrics.stage("propose"):
            device.now += propose
    assert clock.milliseconds(2) == {"score": 4.5, "propose": 1.5}
    assert metrics.seconds["score"] > 0


def test_a_stage_that_fails_is_in_no_sum():
    device = FakeDevice()
    clock, metrics = StageClock(device.event, device.wait), EngineMetrics()
    clock.watch(metrics)
    with pytest.raises(RuntimeError, match="no device"), metrics.stage("score"):
        raise RuntimeError("no device")
    assert clock.milliseconds(1) == {}


def kernels(*spans: tuple[str, float], gap: float = 0.0, start: float = 0.0) -> list[Span]:
    """One behind the other, each of so many microseconds."""
    of_spans = []
    for name, microseconds in spans:
        of_spans.append(Span(start, start + microseconds, name))
        start += microseconds + gap
    return of_spans


@pytest.mark.parametrize("selects", [False, True])
def test_a_round_is_divided_by_the_kernels_at_the_ends_of_its_stages(selects):
    """Of two rounds the second is as long again; of the last one the profiler has seen the beginning alone."""
    plan, store, settle = (
        kernel.__name__
        for kernel in (decoding_round._plan_kernel, decoding_round._store_drafts_kernel, decoding_round._settle_kernel)
    )
    select = [(select_drafts._select_kernel.__name__, 30.0)] if selects else []
    passes = 2 * [("gemm", 50.0), (store, 10.0)]
    one = [(plan, 10.0), *passes, *select, ("gemm", 200.0), ("attention", 100.0), (settle, 5.0)]
    two = [(name, 2 * microseconds) for name, microseconds in one]
    spans = kernels(("gemm", 7.0), (settle, 5.0), ("copy", 9.0), *one, ("copy", 50.0), *two, *one[:-1])
    expected = {"plan": 0.015, "draft": 0.18, "select": 0.045, "target": 0.45, "settle": 0.0075}
    if not selects:
        del expected["select"]
    found = round_milliseconds(reversed(spans))
    assert list(found) == list(expected)
    assert found == pytest.approx(expected)
    assert round_milliseconds(kernels(*one, gap=1.0))["target"] == pytest.approx(0.303)  # with the gaps
    assert round_milliseconds([]) == {}


def test_waiting_for_copies_is_told_from_work():
    times = iter([10.0, 12.5, 20.0, 20.5])
    copies = TimedCopies(Copies(), lambda: next(times))
    source = torch.arange(3)
    readings = [copies.read(source) for _ in range(2)]
    source.zero_()
    for reading in readings:
        assert reading.values().tolist() == [0, 1, 2]
    assert copies.seconds == 3.0
    assert copies.upload(source) is source


def test_a_device_is_idle_where_no_span_covers_it():
    assert idle_share([Span(0.0, 2.0), Span(3.0, 4.0)]) == 0.25
    assert idle_share([Span(3.0, 4.0), Span(0.0, 2.0), Span(1.0, 3.5)]) == 0.0  # streams side by side, in any order
    assert idle_share([Span(0.0, 10.0), Span(2.0, 3.0)]) == 0.0
    assert idle_share([]) is None
    assert idle_share([Span(1.0, 1.0)]) is None


@given(spans=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)), min_size=1))
def test_idle_is_every_moment_between_the_ends_that_no_span_covers(spans):
    spans = [(begin, begin + length) for begin, length in spans]
    first, last = min(begin for begin, _ in spans), max(end for _, end in spans)
    busy = sum(any(begin <= moment < end for begin, end in spans) for moment in range(first, last))
    expected = None if last == first else 1.0 - busy / (last - first)
    assert idle_share([Span(begin, end) for begin, end in spans]) == expected
