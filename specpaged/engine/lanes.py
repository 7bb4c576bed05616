"""Two threads beside one another: one runs the target, the other one the drafter."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch

from specpaged.modeling.loaded_model import LoadedModel

logger = logging.getLogger("specpaged")

Verified = TypeVar("Verified")
Drafted = TypeVar("Drafted")


class Lanes:
    """Runs a target's pass beside a drafter's, on cores or on streams of their own, and waits for both.

    On a CPU each thread is bound to its own half of the cores, and C++ kernels use no more threads than the thread that
    calls them has cores. By number, passes have as many threads as ever, so that each computes the very bits that it
    computes alone. A call into these kernels leaves the interpreter's lock to the other lane. Where there is one core
    or one thread, or where passes are torch's, which has as many threads as it was told, nothing is bound, and the
    lanes share.

    On a GPU each thread launches on a stream of its own, of its model's device, behind what the host has launched. A
    lane ends when its stream is idle, so that whoever is next finds memory written, and may free it.
    """

    def __init__(self, target: LoadedModel, draft: LoadedModel | None):
        models = [model for model in (target, draft) if model is not None]
        bound = None
        if all(model.device.type == "cpu" and model.backend == "cpp" for model in models):
            bound = split_cores(target.num_threads)
        self.cores: tuple[Sequence[int], Sequence[int]] | None = bound
        self._lanes = [
            _Lane("verify", target.device, bound and bound[0]),
            _Lane("draft", models[-1].device, bound and bound[1]),
        ]

    def run(self, verify: Callable[[], Verified], draft: Callable[[], Drafted]) -> tuple[Verified, Drafted]:
        """What both come to, when both have ended. Raises what `verify` has raised, or else `draft`."""
        for lane in self._lanes:
            lane.wait_for_host()
        futures: list[Future] = []
        try:
            for lane, work in zip(self._lanes, (verify, draft), strict=True):
                futures.append(lane.begin(work))
            wait(futures)
        except BaseException:  # an interrupt: nobody may change what a lane reads
            wait(futures)
            raise
        return futures[0].result(), futures[1].result()


class _Lane:
    def __init__(self, name: str, device: torch.device, cores: Sequence[int] | None):
        self.device = device
        self.cores = cores
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, f"specpaged-{name}", self._bind)

    def begin(self, work: Callable[[], Any]) -> Future:
        return self._thread.submit(self._run, work)

    def wait_for_host(self) -> None:
        """Until what the host has launched is done."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).synchronize()

    def _bind(self) -> None:
        """Before any work: a kernel's helpers inherit the cores of the thread that calls it first."""
        torch.get_num_threads()  # by which torch settles their number, as on all cores
        if self.cores is None:
            return
        try:
            os.sched_setaffinity(0, self.cores)  # of this thread alone
        except OSError as error:
            logger.warning("a lane is not bound to cores %s: %s", list(self.cores), error)

    def _run(self, work: Callable[[], Any]) -> Any:
        with torch.inference_mode(), contextlib.ExitStack() as stack:  # of each thread its own
            if self._stream is None:
                return work()
            stack.enter_context(torch.cuda.device(self.device))
            stack.enter_context(torch.cuda.stream(self._stream))
            try:
                return work()
            finally:
                self._stream.synchronize()


def split_cores(num_threads: int) -> tuple[Sequence[int], Sequence[int]] | None:
    """Of the cores that this thread may run on, as many as there are threads, in two parts; None for fewer than two."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))[:num_threads]
    if len(cores) < 2:
        return None
    half = (len(cores) + 1) // 2
    return cores[:half], cores[half:]
