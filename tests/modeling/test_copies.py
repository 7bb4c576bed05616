"""Reads of a device, on streams that run their work in any order that is allowed, and as late as that."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from specpaged.modeling.copies import Copies, StreamCopies


class FakeEvent:
    def __init__(self, stream: FakeStream, count: int):
        self.stream, self.count = stream, count

    def synchronize(self) -> None:
        self.stream.device.num_waits += 1
        self.stream.run(self.count)


class FakeStream:
    """Work is kept until somebody waits for it, or for what is behind it."""

    def __init__(self, device: FakeDevice):
        self.device, self.work, self.done = device, [], 0

    def launch(self, work) -> None:
        self.work.append(work)

    def record_event(self) -> FakeEvent:
        return FakeEvent(self, len(self.work))

    def wait_event(self, event: FakeEvent) -> None:
        self.launch(lambda: event.stream.run(event.count))

    def wait_stream(self, other: FakeStream) -> None:
        self.wait_event(other.record_event())

    def run(self, count: int) -> None:
        while self.done < count:
            self.done += 1
            self.work[self.done - 1]()


class FakeDevice:
    """Stands for torch.cuda: the current stream takes the work."""

    def __init__(self, monkeypatch):
        self.num_waits = 0
        self.main = self.current = FakeStream(self)
        honest_empty, honest_copy = torch.empty, torch.Tensor.copy_

        @contextmanager
        def stream(of_work):
            self.current, before = of_work, self.current
            yield
            self.current = before

        def copy_(target, source, non_blocking=False):
            assert non_blocking
            self.current.launch(lambda: honest_copy(target, source))
            return target

        def empty(*shape, pin_memory=False, **options):
            assert pin_memory
            return honest_empty(*shape, **options)

        for name, fake in (
            ("Stream", lambda device: FakeStream(self)), ("current_stream", lambda device: self.current),
            ("stream", stream),
        ):  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch.Tensor, "copy_", copy_)
        monkeypatch.setattr(torch, "empty", empty)


@pytest.fixture
def device(monkeypatch):
    return FakeDevice(monkeypatch)


def test_a_read_is_of_its_round_though_the_next_one_has_been_launched(device):
    """Rounds write their number to one buffer; each is asked for before the next is launched, and read behind that."""
    copies, result = StreamCopies(torch.device("cuda")), torch.zeros(2, dtype=torch.int64)
    before, seen = None, []
    for number in range(1, 5):
        device.main.launch(lambda number=number: result.fill_(number))
        reading = copies.read(result)
        assert device.num_waits == len(seen)  # neither launching nor asking waits
        if before is not None:
            seen.append(before.values().tolist())
            assert device.main.done < len(device.main.work)  # the round that was just launched is not waited for
        before = reading
    assert seen == [[1, 1], [2, 2], [3, 3]]
    assert before.values().tolist() == [4, 4]


def test_the_next_round_does_not_overtake_the_copy(device):
    """The device may run as far ahead as it is let: what was asked for is still the round's own."""
    copies, result = StreamCopies(torch.device("cuda")), torch.zeros(1, dtype=torch.int64)
    device.main.launch(lambda: result.fill_(1))
    reading = copies.read(result)
    device.main.launch(lambda: result.fill_(2))
    device.main.run(len(device.main.work))
    assert result.tolist() == [2]
    assert reading.values().tolist() == [1]


def test_on_a_cpu_a_read_is_a_copy():
    values = torch.arange(3)
    reading = Copies().read(values)
    values.zero_()
    assert reading.values().tolist() == [0, 1, 2]
