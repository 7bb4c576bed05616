"""What a round takes at each K: the calls that an engine really runs are timed, by turns."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from statistics import fmean, median

from specpaged.engine.call_length import FEW, CallLength
from specpaged.engine.engine import Engine
from specpaged.engine.sequence import Sequence
from specpaged.sampling_params import SamplingParams

DEPTHS = (0, 4, 1, 8, 2, 6, 3)  # in this order: each comes behind one that is far from it
MOST_DEPTH = max(DEPTHS)
_TIMED_ROUNDS = 8  # of a turn, at least
_NUM_MEANS = 5  # of which the median counts


class RoundTimer:
    """Times rounds of an engine whose batch goes on unchanged, while K goes from one depth to the next.

    The prompts are cut to their last tokens where outputs would find no room behind them. `params` says how tokens are
    chosen, and by `max_tokens` how long contexts grow: behind that many the batch begins anew, and nothing else ends
    an output. The engine is to have a drafter, and to be idle, and is left so.

    Raises:
        ValueError: max_model_len is too short for the rounds of one turn.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: SequenceOf[SequenceOf[int]],
        params: SamplingParams,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.engine = engine
        self.params = replace(params, ignore_eos=True, max_tokens=None, min_tokens=0, stop=None, stop_token_ids=None)
        self.max_tokens = math.inf if params.max_tokens is None else params.max_tokens
        self.clock = clock
        self._next_prompt = 0
        most_rounds = min(FEW, engine.speculative_step.call_length.most)
        longest = max(_num_calls(n) * n * (1 + MOST_DEPTH) for n in (1, most_rounds)) + MOST_DEPTH + 1
        room = (engine.config.max_model_len - longest) // 2  # as much is for what comes while others' prompts run
        if room < 1:
            raise ValueError(
                f"max_model_len={engine.config.max_model_len} has no room for rounds to be timed; "
                f"allowed: {longest + 2} or more"
            )
        self.prompts = [list(prompt[-room:]) for prompt in prompts]

    def round_seconds(self, batch_size: int, most_rounds: int, budget: float) -> list[float] | None:
        """[K] seconds of a round of `batch_size` sequences, K = 0 first: medians of means, of what is timed in `budget`
        seconds; once, however long that takes.

        A round in which prompt lookup finds nothing takes far less than others: of both there is a share in the mean.

        Contexts grow from turn to turn, and rounds with them. So depths come in their order and backwards, equally
        often, each time with new requests, and what a round takes is the mean of both: that of the mean context.
        Up to `most_rounds` rounds, and no more than FEW, are one call, where the engine runs several at once. K = 0 is
        timed without a drafter, as plain decoding runs. K that are not timed lie between their neighbours. None if the
        engine's KV has no room for so many sequences.
        """
        step = self.engine.speculative_step
        before = step.planner, step.call_length
        step.planner, step.call_length = None, CallLength(min(FEW, most_rounds))
        forwards: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
        backwards: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
        start, num_times = self.clock(), 0
        try:
            while not num_times or (self.clock() - start) * (num_times + 1) / num_times <= budget:
                num_times += 1
                for depths, seconds in ((DEPTHS, forwards), (DEPTHS[::-1], backwards)):
                    if not self._sweep(batch_size, depths, seconds):
                        return None
        finally:
            step.planner, step.call_length = before
        return _between({depth: (_typical(forwards[depth]) + _typical(backwards[depth])) / 2 for depth in DEPTHS})

    def _sweep(self, batch_size: int, depths: SequenceOf[int], seconds: dict[int, list[float]]) -> bool:
        """Time a turn of each depth; False where the batch did not stay whole."""
        drafter = self.engine.speculative_step.drafter
        sequences: list[Sequence] = []
        may_draft = True
        try:
            for depth in depths:
                if not (may_draft and self._has_room(sequences, depth)):
                    self._abort()
                    sequences = self._start(batch_size)
                if not self._turn(sequences, depth, seconds[depth]):
                    return False
                # Hidden states do not come again: heads have not read those of a turn without a drafter.
                may_draft = depth > 0 or drafter.hidden_states is None
            return True
        finally:
            self._abort()

    def _turn(self, sequences: SequenceOf[Sequence], depth: int, seconds: list[float]) -> bool:
        """Some calls, of which the first verifies what the depth before has left, or catches up: it is not timed."""
        engine, step = self.engine, self.engine.speculative_step
        drafter = step.drafter
        for sequence in sequences:
            sequence.max_draft_tokens = depth
        step.drafter = drafter if depth else None
        try:
            for call in range(_num_calls(step.call_length.most)):
                if len(engine.scheduler.running) < len(sequences):
                    return False
                num_rounds = step.metrics.rounds
                start = self.clock()
                engine.step()
                taken = self.clock() - start
                num_rounds = step.metrics.rounds - num_rounds
                if call and num_rounds:
                    seconds.append(taken / num_rounds)
            return True
        finally:
            step.drafter = drafter

    def _start(self, batch_size: int) -> list[Sequence]:
        """The next prompts' sequences, each with its first output tokens, if they did not fail."""
        engine, sequences = self.engine, []
        for i in range(batch_size):
            request_id = f"timed-{i}"
            engine.add_request(request_id, self.prompts[self._next_prompt % len(self.prompts)], self.params)
            self._next_prompt += 1
            [sequence] = engine.requests[request_id].sequences
            sequence.max_draft_tokens = 1  # so that the drafter runs the prompts, too
            sequences.append(sequence)
        while not all(sequence.output_token_ids or sequence.has_ended for sequence in sequences):
            engine.step()
        engine.step()  # the drafter may lie a step behind
        return sequences

    def _has_room(self, sequences: SequenceOf[Sequence], depth: int) -> bool:
        most_rounds = self.engine.speculative_step.call_length.most
        num_tokens = _num_calls(most_rounds) * most_rounds * (1 + depth) + MOST_DEPTH + 1
        longest = max((sequence.num_tokens for sequence in sequences), default=self.engine.config.max_model_len)
        num_outputs = max((len(sequence.output_token_ids) for sequence in sequences), default=0)
        return longest + num_tokens <= self.engine.config.max_model_len and num_outputs < self.max_tokens

    def _abort(self) -> None:
        for request_id in list(self.engine.requests):
            self.engine.abort_request(request_id)


def _num_calls(most_rounds: int) -> int:
    """Of a turn, the one that is not timed among them."""
    return 1 + max(2, _TIMED_ROUNDS // most_rounds)


def _typical(seconds: SequenceOf[float]) -> float:
    """The median of the means of groups of every so many: few rounds that noise made long do not count."""
    return median([fmean(seconds[i::_NUM_MEANS]) for i in range(min(_NUM_MEANS, len(seconds)))])


def _between(timed: dict[int, float]) -> list[float]:
    """[K] of what is known of some K: on the line between the neighbours of those that are not."""
    known = sorted(timed)
    seconds = []
    for k in range(known[-1] + 1):
        above = known[bisect_left(known, k)]
        below = known[max(0, bisect_left(known, k) - 1)] if above != k else k
        share = (k - below) / (above - below) if above != below else 0.0
        seconds.append(timed[below] + share * (timed[above] - timed[below]))
    return seconds
