"""Our contenders: an LLM, and a client that keeps B requests in flight."""

from __future__ import annotations

import functools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from specpaged import LLM, SamplingParams
from specpaged.metrics import EngineMetrics
from specpaged.modeling.loading import load_model

MAX_MODEL_LEN = 512
MAX_NUM_SEQS = 128
MAX_NUM_BATCHED_TOKENS = 2048
TURN_SECONDS = 0.03  # shorter than most of the noise, which then hits all contenders; longer than caches take to fill
TURN_STEPS = 4  # at least, however long: of the last one, its engine hears of the target's pass alone
_PASSES = ("forward", "greedy", "greedy_steps", "rounds")
_DECIDING = ("plan", "rounds", "select", "look_back", "committed", "fared", "told", "went_on", "begin", "forget")
_LISTENING = ("begin", "scored", "ran", "proposed", "proposed_for")


@contextmanager
def models_loaded_once() -> Iterator[None]:
    """Engines that are made in here share weights, as far as they have the same models.

    Else one of two that do the same may be 2 % faster by where its weights lie, and each finds the other's in the
    caches when its turn comes.
    """
    with mock.patch("specpaged.modeling.pair.load_model", functools.cache(load_model)):
        yield


@dataclass(frozen=True)
class Run:
    """One contender's share of a round: outputs in the order of the prompts, wall time with prefill."""

    token_ids: list[list[int]]
    seconds: float
    metrics: EngineMetrics | None = None  # of this run alone; None for transformers
    forward_seconds: float | None = None  # in the models' passes, both of them
    deciding_seconds: float = 0.0  # in what decides how much to draft, and learns from it
    latencies: list[float] = field(default_factory=list)  # seconds, of each prompt

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.token_ids)) / self.seconds


class Ours:
    """One loaded engine. K = 0 has no draft model at all: it is the plain path.

    `engine` is what else LLM takes, or other sizes.
    """

    def __init__(
        self,
        name: str,
        numerics: str,
        output_len: int,
        target: str | None = None,
        engine: Mapping[str, Any] | None = None,
        **speculative: Any,
    ):
        self.name = name
        self.numerics = numerics
        sizes = {
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": MAX_NUM_SEQS,
            "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        }
        arguments = sizes | dict(engine or {})
        self.llm = LLM(target, speculative_config=speculative, numerics=numerics, dtype="float32", **arguments)
        self.params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        self.forward_seconds = self.deciding_seconds = 0.0
        self._is_clocked = False
        for runner in (self.llm.engine.target, self.llm.engine.draft):
            self._clock(runner, _PASSES, "forward_seconds")
        planner = self.llm.engine.speculative_step.planner
        self._clock(planner, _DECIDING, "deciding_seconds")
        self._clock(planner and planner.clock, _LISTENING, "deciding_seconds")

    def _clock(self, owner: object | None, names: Sequence[str], seconds: str) -> None:
        """Add the time of these calls to an attribute of ours, but of those that are part of another such call."""
        for name in names if owner is not None else ():
            setattr(owner, name, self._clocked(getattr(owner, name), seconds))

    def _clocked(self, function: Callable[..., Any], seconds: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if self._is_clocked:
                return function(*arguments, **options)
            self._is_clocked = True
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self._is_clocked = False
                setattr(self, seconds, getattr(self, seconds) + time.perf_counter() - start)

        return call

    def num_draft_tokens(self, batch_size: int) -> int:
        """K with this many sequences running; 0 where it is decided in every step."""
        speculative = self.llm.config.speculative_config
        return 0 if speculative.is_adaptive else speculative.num_draft_tokens(batch_size)

    def prepare(self, batch_size: int) -> None:
        """Nothing depends on B: max_num_seqs is the largest one."""

    def run(self, prompts: Sequence[Sequence[int]], batch_size: int, k: int | None = None) -> Run:
        """See Contender; `k` is the requests' own K, at most the engine's."""
        stint = Stint(self, prompts, batch_size, k)
        while not stint.is_done:
            stint.go_on(math.inf)
        return stint.run()


def take_turns(stints: Sequence[Stint]) -> None:
    """All of them to their end, each for a moment, in this order."""
    while going_on := [stint for stint in stints if not stint.is_done]:
        for stint in going_on:
            stint.go_on(TURN_SECONDS)


class Stint:
    """An engine's way through some prompts, at most B at a time, that can be interrupted between two steps.

    Contenders that take short turns see the same machine: noise that lasts longer hits all of them.
    """

    def __init__(self, ours: Ours, prompts: Sequence[Sequence[int]], batch_size: int, k: int | None = None):
        self.ours = ours
        self.batch_size = batch_size
        self.params = ours.params if k is None else replace(ours.params, extra_args={"num_speculative_tokens": k})
        self.token_ids: list[list[int]] = [[] for _ in prompts]
        self.latencies: list[float] = [0.0] * len(prompts)  # seconds of each request, on the stint's own clock
        self.seconds = 0.0
        self._waiting = deque(enumerate(prompts))
        ours.llm.engine.reset_metrics()
        ours.forward_seconds = ours.deciding_seconds = 0.0

    @property
    def is_done(self) -> bool:
        return not self._waiting and not self.ours.llm.engine.has_unfinished_requests

    def go_on(self, seconds: float) -> None:
        """Step for so long, and at least some times, or to the end. What others do then is no part of its last step."""
        engine, waiting = self.ours.llm.engine, self._waiting
        num_steps = 0
        start = now = time.perf_counter()
        while (now - start < seconds or num_steps < TURN_STEPS) and not self.is_done:
            for _ in range(self.num_admitted(len(engine.requests))):
                if waiting:
                    index, prompt = waiting.popleft()
                    engine.add_request(str(index), prompt, self.params_of(index))
                    self.latencies[index] -= self.seconds + now - start
            outputs = engine.step()
            num_steps += 1
            now = time.perf_counter()
            for output in outputs:
                index = int(output.request_id)
                self.token_ids[index] = output.outputs[0].token_ids
                self.latencies[index] += self.seconds + now - start
        self.seconds += now - start
        if (planner := engine.speculative_step.planner) is not None:
            planner.clock.idle()

    def num_admitted(self, num_running: int) -> int:
        """How many requests come now, with so many in the engine."""
        return self.batch_size - num_running

    def params_of(self, index: int) -> SamplingParams:
        """Of a request."""
        return self.params

    def run(self) -> Run:
        """What came of it, once it is done."""
        engine = self.ours.llm.engine
        engine.check_integrity()
        return Run(
            self.token_ids,
            self.seconds,
            engine.metrics,
            self.ours.forward_seconds,
            self.ours.deciding_seconds,
            self.latencies,
        )
