"""What the loop's clock adds up, by the events of a device that is none."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.device.stage_clock import StageClock, TimedCopies, idle_share
from specpaged.metrics import EngineMetrics
from specpaged.modeling.copies import Copies


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


def test_marks_divide_a_round():
    device = FakeDevice()
    clock = StageClock(device.event, device.wait)
    with pytest.raises(RuntimeError, match="'plan' was marked before the clock began"):
        clock.mark("plan")
    for _ in range(2):
        clock.begin()
        for stage, milliseconds in (("plan", 1.0), ("draft", 6.0), ("target", 10.0)):
            device.now += milliseconds
            clock.mark(stage)
        device.now += 50.0  # until the next round begins
    assert clock.milliseconds(2) == {"plan": 1.0, "draft": 6.0, "target": 10.0}


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
    assert idle_share([(0.0, 2.0), (3.0, 4.0)]) == 0.25
    assert idle_share([(3.0, 4.0), (0.0, 2.0), (1.0, 3.5)]) == 0.0  # streams side by side, in any order
    assert idle_share([(0.0, 10.0), (2.0, 3.0)]) == 0.0
    assert idle_share([]) is None
    assert idle_share([(1.0, 1.0)]) is None


@given(spans=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)), min_size=1))
def test_idle_is_every_moment_between_the_ends_that_no_span_covers(spans):
    spans = [(begin, begin + length) for begin, length in spans]
    first, last = min(begin for begin, _ in spans), max(end for _, end in spans)
    busy = sum(any(begin <= moment < end for begin, end in spans) for moment in range(first, last))
    expected = None if last == first else 1.0 - busy / (last - first)
    assert idle_share(spans) == expected
