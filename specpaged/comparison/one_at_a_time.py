"""Decoding prompts one at a time, in several processes where that pays: what a batch is compared with."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Protocol

import torch
from tqdm import tqdm

from specpaged.sampling_params import SamplingParams

MIN_PROMPTS = 16  # of a process: starting one takes as long as decoding a few prompts
MAX_WEIGHT_BYTES = 1 << 30  # of all processes together: each holds a copy


class Reference(Protocol):
    """What decodes one prompt at a time."""

    def generate(self, token_ids: Sequence[int], params: SamplingParams) -> list[int]:
        """The completion's token ids."""
        ...


def num_processes(num_prompts: int, weight_bytes: int, device: torch.device) -> int:
    """How many processes cores, prompts and memory allow, each with torch's present number of threads."""
    if device.type != "cpu":
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limits = (cores // torch.get_num_threads(), num_prompts // MIN_PROMPTS, MAX_WEIGHT_BYTES // max(1, weight_bytes))
    return max(1, min(limits))


def decode(
    make: Callable[[], Reference], prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], processes: int
) -> list[list[int]]:
    """Completions in the prompts' order, with a progress bar; every process makes a reference of its own.

    Raises what a reference raises.
    """
    pairs = list(zip(prompts, params, strict=True))
    if processes == 1:
        reference = make()
        return [reference.generate(*pair) for pair in tqdm(pairs, unit="prompt")]
    context = multiprocessing.get_context("spawn")
    threads = torch.get_num_threads()
    with ProcessPoolExecutor(processes, context, initializer=_start, initargs=(make, threads)) as executor:
        return list(tqdm(executor.map(_decode, pairs), total=len(pairs), unit="prompt"))


# Of a worker process.
_make: Callable[[], Reference] | None = None
_reference: Reference | None = None


def _start(make: Callable[[], Reference], threads: int) -> None:
    global _make
    torch.set_num_threads(threads)
    _make = make


def _decode(pair: tuple[Sequence[int], SamplingParams]) -> list[int]:
    global _reference
    if _reference is None:  # not in _start: what fails there breaks the pool, which does not say why
        _reference = _make()
    return _reference.generate(*pair)
