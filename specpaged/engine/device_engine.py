"""The engine whose rounds the device runs by itself, with the host one round late."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import torch
from typing_extensions import override

from specpaged.drafting.base import DraftRow
from specpaged.drafting.draft import NO_DRAFT
from specpaged.engine.device_batch import DeviceBatch, draft_context_len
from specpaged.engine.device_commit import Flight, commit_flight
from specpaged.engine.engine import Engine
from specpaged.engine.host_reasons import decodes, why_never, why_not
from specpaged.engine.scheduler import ScheduledStep
from specpaged.engine.sequence import Sequence
from specpaged.modeling.copies import Copies, copies_of
from specpaged.modeling.cuda_graphs import CudaGraphs, Record, Recorder
from specpaged.modeling.device_round import DeviceRound
from specpaged.modeling.device_state import DeviceState, RowState
from specpaged.outputs import RequestOutput
from specpaged.paging.block_allocator import OutOfBlocksError
from specpaged.paging.page_table import DRAFT

logger = logging.getLogger("specpaged")

_MOST_BEHIND = 2  # tokens that a round's first pass of the draft runs of a sequence


class DeviceEngine(Engine):
    """An Engine that leaves rounds to the device where every sequence decodes, and steps as any other elsewhere.

    While the device runs round r + 1 the host reads round r: appends its tokens, looks for stops, publishes, frees.
    What it finds takes effect one round late: who has ended has one more round on the device, of which nothing is
    read. With `config.synchronous` each round is read before the next one is launched. Slots are reserved for the most
    that both rounds may write. All else (a prefill, an admission, a preemption) is the host's step, behind a round that
    was read; `host_steps` counts those by their reason.
    """

    def __init__(self, *arguments: Any, copies: Copies | None = None, record: Record | None = None, **named: Any):
        super().__init__(*arguments, **named)
        config, target = self.config, self.target
        self.host_steps: Counter[str] = Counter()
        self._never = why_never(self)
        self._host_next: str | None = None  # why the next step is the host's
        self._refused: tuple[Sequence, int] | None = None  # who could not be admitted, beside how many
        self._flight: Flight | None = None
        if self._never is not None:
            logger.warning("device_round=True, and all rounds are the host's all the same: %s", self._never)
            return
        device = target.model.device
        self.copies = copies or copies_of(device)
        state = DeviceState(config.max_num_seqs, config.max_model_len, config.block_size, device, self.copies)
        self.batch = DeviceBatch(state)
        if record is None and CudaGraphs.why_not(target.model, config.enforce_eager) is None:
            record = Recorder(device)
        self.round = DeviceRound(state, target, self.draft, self.vocabulary.size, self.max_draft_tokens, record)

    @override
    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Run one step, the device's or the host's; the outputs of the requests that ended in it: see Engine.step.

        A round's tokens come with the step that launches the one behind it.
        """
        reason = self._never or self._why_host()
        if reason is None:
            with self.recovery:
                reason = self._device_step()
                if reason is None:
                    return self._outputs()
            if reason is None:  # it has failed: everybody begins anew, and not here
                self._never = "a round failed"
                logger.warning("a round on the device failed: all rounds are the host's from now on")
                self._flight = None
                self.batch.clear()
                return []
        if self._flight is not None:
            with self.recovery:
                self._land()
            if self._flight is not None:  # it could not be read: what the device has is not what the host knows
                self._flight = None
                self.batch.clear()
        self.host_steps[reason] += 1
        self._host_next = None
        if self._never is not None:
            return super().step()
        queue = self._queue() if all(map(decodes, self.scheduler.running)) else None
        outputs = super().step()
        # Nobody was prefilled, and yet the first of those who wait was not admitted: there are no blocks for it.
        self._refused = queue if queue == self._queue() else None
        return outputs

    @override
    def check_integrity(self) -> None:
        super().check_integrity()
        if self._never is None:
            self.batch.check_integrity(is_ahead=self._flight is not None)

    @override
    def _finish(self, sequence: Sequence, reason: str) -> None:
        super()._finish(sequence, reason)
        if self._never is None:
            self.batch.remove(sequence)

    def _why_host(self) -> str | None:
        """What the host has to do, if anything."""
        if self._host_next is not None:
            return self._host_next
        scheduler = self.scheduler
        running, waiting = scheduler.running, scheduler.waiting
        if not running and self._flight is None:
            return "nobody runs"
        if waiting and len(running) < self.config.max_num_seqs and self._refused != self._queue():
            return "admission"
        for sequence in running:
            if not decodes(sequence):
                return "prefill"
            if sequence not in self.batch.members:
                reason = why_not(sequence)
                if reason is not None:
                    return reason
        return None

    def _queue(self) -> tuple[Sequence, int] | None:
        """The first of those who wait, and how many run; None where nobody waits."""
        waiting = self.scheduler.waiting
        return (waiting[0], len(self.scheduler.running)) if waiting else None

    def _device_step(self) -> str | None:
        """Launch a round, and read one; or the reason why the host has to go on, and nothing was launched."""
        before, flight = self._flight, None
        with self._metrics.stage("schedule"):
            states = self._reserve()
        if states is None:
            return "no blocks"
        # A round in flight brings everybody a token at least.
        if any(state.limit - state.num_tokens > (before is not None) for state in states):
            with self._metrics.stage("score"):
                flight = self._launch(states)
        if self.config.synchronous:
            self._flight = flight
            flight = None
        self._land()
        self._flight = flight
        self._metrics.record_blocks(self.allocator.num_held, self.kv_layout.num_draft_held)
        return None

    def _reserve(self) -> list[RowState] | None:
        """The states of all that run, with slots for whatever a round may write; None where blocks do not suffice."""
        running = self.scheduler.running
        states = []
        budget, configured = self.config.max_num_batched_tokens - len(running), self._num_configured()
        try:
            for sequence in running:
                self._take_over(sequence)
                k = min(configured, sequence.max_draft_tokens, budget)
                budget -= k
                state = self._state(sequence, k, drafts=configured > 0)
                states.append(state)
                most = state.num_tokens + k + (self._flight is not None) * (self.round.num_drafts + 1)
                # The last token of all has no KV.
                sequence.page_table.reserve(max(state.num_tokens, min(most, state.limit - 1)))
        except OutOfBlocksError:
            return None
        return states

    def _num_configured(self) -> int:
        """K of everybody who may draft as many."""
        if not self.max_draft_tokens:
            return 0
        return self.config.speculative_config.num_draft_tokens(len(self.scheduler.running))

    def _state(self, sequence: Sequence, k: int, drafts: bool) -> RowState:
        """The row of a sequence with k drafts; where nobody `drafts`, its KV of the draft falls behind."""
        params = sequence.params
        limit = self.config.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, sequence.num_prompt_tokens + params.max_tokens)
        has_draft = drafts and sequence.max_draft_tokens > 0
        return RowState(
            num_tokens=len(sequence.token_ids),
            draft_context_len=draft_context_len(sequence) if has_draft else 0,
            limit=limit,
            max_drafts=k,
            has_draft=has_draft,
            num_prompt_tokens=sequence.num_prompt_tokens,
            seed=sequence.seed,
            temperature=params.temperature,
        )

    def _take_over(self, sequence: Sequence) -> None:
        """Drop what the host has drafted for a sequence, if anything: its rounds draft for themselves."""
        sequence.draft, num_tokens = NO_DRAFT, len(sequence.token_ids)
        if draft_context_len(sequence) >= num_tokens:
            sequence.page_table.truncate(DRAFT, num_tokens - 1)

    def _launch(self, states: list[RowState]) -> Flight:
        running = list(self.scheduler.running)
        self._catch_up(states)
        members = self.batch.sync(running, states)
        self.batch.state.flush()
        late = self._flight is not None
        lengths = [min(s.limit, s.num_tokens + s.max_drafts + late * (self.round.num_drafts + 1)) for s in states]
        temperatures = [sequence.params.temperature for sequence in running]
        num_drafts = self._num_configured() if any(state.has_draft for state in states) else 0
        bucket = self.round.bucket(
            self.batch.num_rows, num_drafts, lengths, any(temperatures), any(t not in (0, 1) for t in temperatures)
        )
        result = self.round.launch(bucket)
        return Flight(members, [state.has_draft for state in states], self.copies.read(result))

    def _catch_up(self, states: list[RowState]) -> None:
        """Run the draft over what it has not seen, but for what a round runs itself."""
        rows = []
        for sequence, state in zip(self.scheduler.running, states, strict=True):
            if not state.has_draft:
                continue
            start, end = state.draft_context_len, state.num_tokens - 1
            # Of a round in flight in which nobody drafts everybody gets one token.
            late = self._flight is not None and not self.batch.members[sequence].state.has_draft
            if end + 1 + late - start > _MOST_BEHIND and end > start:
                table = sequence.page_table
                rows.append(DraftRow(sequence, sequence.token_ids[start:end], start, table.entries, 0, 0))
                state.draft_context_len = end
        if not rows:
            return
        step = self.speculative_step
        step.drafter.propose(rows, step.sampling([]))
        for row in rows:
            row.sequence.page_table.advance(DRAFT, len(row.token_ids))

    def _land(self) -> None:
        """Read the round in flight, if there is one, and do what follows from it."""
        if self._flight is None:
            return
        entries, failed = commit_flight(self.speculative_step, self.batch, self._flight)
        self._flight = None
        if failed:
            self._host_next = "no token"  # which the host looks into, without drafts
        self._finish_who_ended(ScheduledStep(tuple(entries)))
