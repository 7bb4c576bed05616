"""What a target's pass and a proposal take: on all cores, on a lane's own alone, and beside the other lane's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from specpaged.engine.lanes import Lanes
from specpaged.engine.overlap_engine import OverlapEngine
from specpaged.modeling.model_runner import ModelRunner
from specpaged.modeling.ragged_batch import RaggedRow, pack

SECONDS = 1.5  # of each measurement
FEWEST = 8  # calls of each


class LanePasses:
    """Passes of an idle engine's models, over KV that is nobody's: greedy, of sequences that are all alike.

    `all` are passes of the whole batch on the host's threads; `lane` and `beside` of half of it, in a lane, while the
    other one is idle, and while it does the same with the other model. What the last takes more than the one before is
    what sharing memory and caches costs.
    """

    def __init__(self, engine: OverlapEngine, batch_size: int, k: int, context: int):
        if engine.has_unfinished_requests:
            raise RuntimeError("the engine has requests, and their KV would be written over")
        self.engine, self.k, self.context = engine, k, context
        self.batch_size, self.half = batch_size, (batch_size + 1) // 2

    def measure(self) -> dict[str, float]:
        """Milliseconds of each, medians."""
        whole, half = self._calls(self.batch_size), self._calls(self.half)
        found = {f"{name}_all": _timed(call) for name, call in whole.items()}
        lanes = Lanes(self.engine.target.model, self.engine.draft and self.engine.draft.model)
        found["verify_lane"], _ = lanes.run(partial(_timed, half["verify"]), lambda: None)
        _, found["draft_lane"] = lanes.run(lambda: None, partial(_timed, half["draft"]))
        ended = [threading.Event(), threading.Event()]
        found["verify_beside"], found["draft_beside"] = lanes.run(
            partial(_timed, half["verify"], *ended), partial(_timed, half["draft"], *reversed(ended))
        )
        return {name: round(1e3 * seconds, 3) for name, seconds in found.items()}

    def _calls(self, num_seqs: int) -> dict[str, Callable[[], None]]:
        """A target's pass over K drafts of each sequence, and a proposal of as many."""
        target, draft = self.engine.target, self.engine.draft
        return {
            "verify": partial(_verify, target, self._rows(target, num_seqs, 1 + self.k)),
            "draft": partial(_draft, draft, self._rows(draft, num_seqs, 1), self.k),
        }

    def _rows(self, runner: ModelRunner, num_seqs: int, num_tokens: int) -> list[RaggedRow]:
        """On blocks of their own, as far as there are some, with room for all drafts."""
        cache = runner.kv_cache
        each = -(-(self.context + 1 + self.k) // cache.block_size)
        firsts = [1 + i * each % (cache.num_blocks - each + 1) for i in range(num_seqs)]
        return [RaggedRow([1] * num_tokens, self.context, range(n, n + each), num_tokens) for n in firsts]


def _verify(runner: ModelRunner, rows: list[RaggedRow]) -> None:
    if runner.runs_greedy:
        runner.greedy(rows, runner.model.vocab_size)
        return
    runner.forward(_packed(runner, rows), argmax_of=runner.model.vocab_size).argmax.token_ids.tolist()


def _draft(runner: ModelRunner, rows: list[RaggedRow], k: int) -> None:
    if runner.runs_greedy:
        runner.greedy(rows, runner.model.vocab_size, [k - 1] * len(rows), wants_logprobs=True)
        return
    for _ in range(k):
        runner.forward(_packed(runner, rows), argmax_of=runner.model.vocab_size).argmax.token_ids.tolist()


def _packed(runner: ModelRunner, rows: list[RaggedRow]):
    return pack(rows, runner.kv_cache.block_size, runner.model.device, runner.kv_cache.block_stride)


@torch.inference_mode()
def _timed(
    call: Callable[[], None], ended: threading.Event | None = None, other_ended: threading.Event | None = None
) -> float:
    """Seconds of a call, the median. Beside another lane it goes on until both have enough: neither is idle before."""
    seconds: list[float] = []
    try:
        call()  # warms up
        start = time.perf_counter()
        while True:
            begun = time.perf_counter()
            call()
            now = time.perf_counter()
            seconds.append(now - begun)
            if now - start < SECONDS or len(seconds) < FEWEST:
                continue
            if other_ended is None or other_ended.is_set():
                return median(seconds)
            ended.set()
    finally:
        if ended is not None:
            ended.set()
