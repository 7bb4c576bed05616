"""The passes that a probe times, of a target behind its drafter's."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median

import torch

from specpaged.drafting.base import Drafter, DraftRow
from specpaged.drafting.draft_model import DraftModelDrafter
from specpaged.drafting.heads import HeadsDrafter
from specpaged.engine.pass_timer import NUM_NEW, Shape, sequences
from specpaged.modeling.forward_output import HiddenStates
from specpaged.modeling.model_runner import ModelRunner
from specpaged.modeling.ragged_batch import RaggedRow, pack
from specpaged.sampling.batch import SamplingBatch
from specpaged.sampling.request import SamplingRequest
from specpaged.sampling_params import SamplingParams

_FURTHER = NUM_NEW - 1  # passes of a proposal behind its first one, timed together
_CATCHING_UP = 5  # times at most
_GREEDY = SamplingRequest(SamplingParams(temperature=0), 0, (), ())
# Caches learn only slowly that weights are read again and again: so many passes alike, or such a time, are a run.
_ALIKE, _ALIKE_SECONDS = 16, 6e-3


def is_heads(runner: ModelRunner) -> bool:
    """Whether these are heads that read a target, and no model of their own."""
    return runner.model.implementation == "heads"


class ProbedDrafter:
    """A model, or heads that read a target, to propose for sequences that nobody has."""

    def __init__(self, runner: ModelRunner, target: ModelRunner):
        self.runner = runner
        self._vocab_size = runner.model.vocab_size
        if is_heads(runner):
            self._vocab_size = target.model.vocab_size
            self._drafter: Drafter = HeadsDrafter(runner, self._vocab_size, with_probs=False)
        else:
            self._drafter = DraftModelDrafter(runner, self._vocab_size, 1 << 30, with_probs=False)
        self.reads = self._drafter.hidden_states
        self.captures = runner.model.device.type != "cpu"  # graphs, of passes whose shape is new
        self._hidden_size = target.model.hidden_size

    def propose(self, rows: list[RaggedRow], num_drafts: int) -> None:
        """So many drafts behind each of the rows, which are run. Heads may have none to make."""
        model = self.runner.model
        wanted = [DraftRow(i, row.token_ids, row.context_len, row.blocks, num_drafts, i) for i, row in enumerate(rows)]
        reads = self.reads
        if reads is not None:
            for i, row in enumerate(wanted):
                states = torch.zeros(len(row.token_ids), self._hidden_size, dtype=model.dtype, device=model.device)
                hidden = HiddenStates(states if reads.last else None, (states,) * len(reads.layer_inputs))
                token_ids = [*row.token_ids, row.token_ids[-1]]
                wanted[i] = replace(row, token_ids=token_ids, hidden_states=hidden, hidden_position=row.context_len)
        self._drafter.propose(wanted, SamplingBatch([_GREEDY] * len(rows), self._vocab_size, model.device))


def verified(target: ModelRunner, drafter: ProbedDrafter | None, saved: list, rows: list[RaggedRow]) -> float:
    """The seconds of a target's pass, behind a drafter's if there is one. `saved` gets what one of a row takes less in
    a run of others alike.
    """
    run = partial(forward, target, rows)
    if target.model.device.type != "cpu":  # a graph may have to be captured
        run()
    if drafter is None:
        return run()
    proposal(drafter, sequences(drafter.runner, Shape(1, 1)), 2)
    seconds = run()
    if sum(len(row.token_ids) for row in rows) == 1:
        saved.append(seconds - _undisturbed(run))
    return seconds


def _undisturbed(run: Callable[[], float]) -> float:
    """The seconds of the last one of a run."""
    start = time.perf_counter()
    for _ in range(_ALIKE):
        seconds = run()
        if time.perf_counter() - start > _ALIKE_SECONDS:
            break
    return seconds


def forward(runner: ModelRunner, rows: list[RaggedRow]) -> float:
    """The seconds of a pass of a model that drafts nothing."""
    start = time.perf_counter()
    if runner.runs_greedy:  # as a step does
        runner.greedy(rows, runner.model.vocab_size)
        return time.perf_counter() - start
    cache = runner.kv_cache
    batch = pack(rows, cache.block_size, runner.model.device, cache.block_stride)
    output = runner.forward(batch, argmax_of=runner.model.vocab_size)
    output.argmax.token_ids.tolist()  # waits for the device
    return time.perf_counter() - start


def drafted(
    drafter: ProbedDrafter,
    first_seconds: dict[int, list[float]],
    first_shares: list[float],
    rows: list[RaggedRow],
) -> float:
    """A pass of several in one proposal."""
    one, four = (proposal(drafter, rows, num_drafts) for num_drafts in (1, 1 + _FURTHER))
    seconds = max((four - one) / _FURTHER, one / 8)
    first = one
    if drafter.reads is not None:
        first -= proposal(drafter, rows, 0)
        first_shares.append(min(1.0, max(0.0, first / seconds)))
    first_seconds.setdefault(len(rows), []).append(max(0.0, first - seconds))
    return seconds


def row_behind(drafter: ProbedDrafter, num_rows: int, left: Callable[[], float]) -> float | None:
    """The seconds of a row that is there to catch up, and not read out: what it takes longer to propose for a sequence
    that is so many rows behind, once or as often as there is time `left`. None where a sequence cannot have several.
    """
    if num_rows < 2:
        return None
    few, many = (sequences(drafter.runner, Shape(1, n)) for n in (1, num_rows))
    more: list[float] = []
    while not more or (len(more) < _CATCHING_UP and left() > 0):
        more.append(proposal(drafter, many, 1) - proposal(drafter, few, 1))
    return max(0.0, median(more)) / (num_rows - 1)


def proposal(drafter: ProbedDrafter, rows: list[RaggedRow], num_drafts: int) -> float:
    """The seconds of one of so many drafts behind each of the rows."""
    if drafter.captures:
        drafter.propose(rows, num_drafts)
    start = time.perf_counter()
    drafter.propose(rows, num_drafts)
    return time.perf_counter() - start
