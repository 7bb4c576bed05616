"""Copies between the host and a device: nobody waits but who asks for what was read, and he for that alone."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from typing_extensions import override

from specpaged.modeling.ragged_batch import upload


class Reading(ABC):
    """What has been asked of the device, and may not be there yet."""

    @abstractmethod
    def values(self) -> Tensor:
        """On the host; waits until the device has come as far as where it was asked for."""


class Copies:
    """Where the device is the host's own memory: a copy is there at once."""

    def upload(self, values: Tensor) -> Tensor:
        """A host tensor on the device; the work that is launched from now on finds it there."""
        return values

    def read(self, source: Tensor) -> Reading:
        """The source as the work that has been launched leaves it; what is launched later may overwrite it."""
        return _Read(source.clone(), None)


class StreamCopies(Copies):
    """Of a CUDA device: reads go over a stream of their own, beside the work that follows.

    That work starts when a read has ended, which takes the device a few microseconds and the host nothing: a round
    writes its result where the one before has written its own.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)

    @override
    def upload(self, values: Tensor) -> Tensor:
        return upload(values, self._device)

    @override
    def read(self, source: Tensor) -> Reading:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            values = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            values.copy_(source, non_blocking=True)
            event = self._stream.record_event()
        current.wait_event(event)
        return _Read(values, event)


class _Read(Reading):
    def __init__(self, values: Tensor, event: torch.cuda.Event | None):
        self._values, self._event = values, event

    @override
    def values(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._values


def copies_of(device: torch.device) -> Copies:
    """The copies of a device."""
    return StreamCopies(device) if device.type == "cuda" else Copies()
