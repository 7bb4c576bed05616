"""Our contenders: an LLM, and a client that keeps B requests in flight."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specpaged import LLM, SamplingParams
from specpaged.metrics import EngineMetrics

MAX_MODEL_LEN = 512
MAX_NUM_SEQS = 128
MAX_NUM_BATCHED_TOKENS = 2048


@dataclass(frozen=True)
class Run:
    """One contender's share of a round: outputs in the order of the prompts, wall time with prefill."""

    token_ids: list[list[int]]
    seconds: float
    metrics: EngineMetrics | None = None  # of this run alone; None for transformers
    forward_seconds: float | None = None  # in the models' passes, both of them

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.token_ids)) / self.seconds


class Ours:
    """One loaded engine. K = 0 has no draft model at all: it is the plain path."""

    def __init__(self, name: str, numerics: str, output_len: int, **speculative: Any):
        self.name = name
        self.numerics = numerics
        self.llm = LLM(
            speculative_config=speculative,
            numerics=numerics,
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        )
        self.params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        self.forward_seconds = 0.0
        self._in_forward = False
        for runner in (self.llm.engine.target, self.llm.engine.draft):
            for name in ("forward", "greedy_steps") if runner is not None else ():
                setattr(runner, name, self._clocked(getattr(runner, name)))

    def _clocked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Adds the time of a call to forward_seconds, unless it is part of another such call."""

        def call(*arguments: Any, **options: Any) -> Any:
            if self._in_forward:
                return function(*arguments, **options)
            self._in_forward = True
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self._in_forward = False
                self.forward_seconds += time.perf_counter() - start

        return call

    def num_draft_tokens(self, batch_size: int) -> int:
        """K with this many sequences running."""
        return self.llm.config.speculative_config.num_draft_tokens(batch_size)

    def prepare(self, batch_size: int) -> None:
        """Nothing depends on B: max_num_seqs is the largest one."""

    def run(self, prompts: Sequence[Sequence[int]], batch_size: int, k: int | None = None) -> Run:
        """See Contender; `k` is the requests' own K, at most the engine's."""
        engine = self.llm.engine
        engine.reset_metrics()
        self.forward_seconds = 0.0
        params = self.params if k is None else replace(self.params, extra_args={"num_speculative_tokens": k})
        waiting = deque(enumerate(prompts))
        token_ids: dict[str, list[int]] = {}
        start = time.perf_counter()
        while waiting or engine.has_unfinished_requests:
            while waiting and len(engine.requests) < batch_size:
                index, prompt = waiting.popleft()
                engine.add_request(str(index), prompt, params)
            for output in engine.step():
                token_ids[output.request_id] = output.outputs[0].token_ids
        seconds = time.perf_counter() - start
        engine.check_integrity()
        in_order = [token_ids[str(i)] for i in range(len(prompts))]
        return Run(in_order, seconds, engine.metrics, self.forward_seconds)
