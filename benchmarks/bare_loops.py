"""What this machine reads and multiplies just now, by loops that do nothing else: the roofs of every pass."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.roofline import Roof
from specpaged_kernels.cpu.build import load

_GRAIN = 64  # floats: a thread's share is a multiple of as many
_READS = 256 << 20  # bytes, at most, that one measurement reads, or all of them once: some 10 ms
_TRIES = 3
_PRODUCTS = 1_000_000  # turns of the loop that multiplies: a few ms


class BareLoops:
    """Loops over `num_bytes` of memory of their own, by `num_threads` threads, of which each has a share.

    As many bytes as a pass reads: what a cache holds for the pass, it holds for the loop.
    """

    def __init__(self, num_bytes: int, num_threads: int):
        library = load(Path(__file__).with_suffix(".cpp"))
        self._read, self._multiply = library.read_floats, library.multiply_floats
        self._read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        self._multiply.argtypes = [ctypes.c_int64, ctypes.c_void_p]
        self._share = max(1, num_bytes // 4 // _GRAIN // num_threads) * _GRAIN
        self._floats = torch.ones(self._share * num_threads)
        self._threads = ThreadPoolExecutor(num_threads)
        self._num_threads = num_threads
        self._times = max(1, _READS // self._floats.nbytes)

    def measure(self) -> Roof:
        """The roof of this moment: all threads read, then all multiply, a few times each, of which the best counts."""
        tries = range(_TRIES)
        return Roof(max(self._bytes_per_second() for _ in tries), max(self._flops_per_second() for _ in tries))

    def _bytes_per_second(self) -> float:
        def read(thread: int) -> None:
            self._read(self._floats.data_ptr() + 4 * thread * self._share, self._share, self._times)

        return self._floats.nbytes * self._times / self._seconds(read)

    def _flops_per_second(self) -> float:
        flops = (ctypes.c_int64 * self._num_threads)()

        def multiply(thread: int) -> None:
            self._multiply(_PRODUCTS, ctypes.addressof(flops) + thread * ctypes.sizeof(ctypes.c_int64))

        seconds = self._seconds(multiply)
        return sum(flops) / seconds

    def _seconds(self, work: Callable[[int], None]) -> float:
        """Of all threads together, each with its number."""
        start = time.perf_counter()
        list(self._threads.map(work, range(self._num_threads)))
        return time.perf_counter() - start
