"""The engine whose rounds the device runs by itself, with the host one round late."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence as SequenceOf
from typing import Any

import torch
from typing_extensions import override

from specpaged.engine.device_batch import DeviceBatch
from specpaged.engine.device_commit import Flight, commit_flight
from specpaged.engine.device_launch import launch, row_state, take_over
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

logger = logging.getLogger("specpaged")


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
        speculative = config.speculative_config
        num_selected = None
        if speculative is not None and speculative.selection == "tetris":
            num_selected = speculative.num_speculative_tokens
        vocab_size, num_drafts = self.vocabulary.size, self.max_draft_tokens
        self.round = DeviceRound(state, target, self.draft, vocab_size, num_drafts, record, num_selected)
        if self.speculative_step.planner is not None:
            self.speculative_step.planner.leave_to_device(waits=config.synchronous)

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

    def keep_on_host(self, reason: str | None) -> None:
        """From now on all rounds are the host's, for this reason; with None they are the device's where they can be.

        For who compares them; no sequence may be here.
        """
        if self.has_unfinished_requests:
            raise RuntimeError("rounds are kept on the host, or no longer, between requests alone")
        if self._flight is not None:  # of sequences that have ended
            self._land()
        self._never = reason or why_never(self)

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
            wanted = self._num_wanted()
            states = self._reserve(wanted)
        if states is None:
            return "no blocks"
        # A round in flight brings everybody a token at least.
        if any(state.limit - state.num_tokens > (before is not None) for state in states):
            with self._metrics.stage("score"):
                flight = self._launch(states, max(wanted, default=0))
        if self.config.synchronous:
            self._flight = flight
            flight = None
        self._land()
        self._flight = flight
        self._metrics.record_blocks(self.allocator.num_held, self.kv_layout.num_draft_held)
        return None

    def _reserve(self, wanted: SequenceOf[int]) -> list[RowState] | None:
        """The states of all that run and want so many drafts, with slots for whatever a round may write; None where
        blocks do not suffice.
        """
        running = self.scheduler.running
        counts: list[int] = []
        budget = self.config.max_num_batched_tokens - len(running)
        try:
            for sequence, num_wanted in zip(running, wanted, strict=True):
                k = min(num_wanted, sequence.max_draft_tokens, budget)
                budget -= k
                counts.append(k)
                num_tokens = len(sequence.token_ids)
                most = num_tokens + k + (self._flight is not None) * (self.round.num_drafts + 1)
                # The last token of all has no KV.
                sequence.page_table.reserve(max(num_tokens, min(most, self._limit(sequence) - 1)))
        except OutOfBlocksError:
            return None  # whoever has drafts of the host's still has them, for its step
        for sequence in running:
            take_over(sequence)
        if self.speculative_step.planner is not None:
            self.speculative_step.planner.dropped()
        return [
            row_state(sequence, self._limit(sequence), k, drafts=num_wanted > 0)
            for sequence, k, num_wanted in zip(running, counts, wanted, strict=True)
        ]

    def _num_wanted(self) -> list[int]:
        """K of each who runs, if it may draft as many."""
        running, speculative = self.scheduler.running, self.config.speculative_config
        if not self.max_draft_tokens:
            return [0] * len(running)
        if speculative.is_adaptive:
            return self.speculative_step.planner.plan_round(running) if running else []
        return [speculative.num_draft_tokens(len(running))] * len(running)

    def _limit(self, sequence: Sequence) -> int:
        """The tokens that there may be of a sequence."""
        most = sequence.params.max_tokens
        if most is None:
            return self.config.max_model_len
        return min(self.config.max_model_len, sequence.num_prompt_tokens + most)

    def _launch(self, states: list[RowState], num_drafts: int) -> Flight:
        return launch(
            self.speculative_step, self.batch, self.round, self.copies, list(self.scheduler.running), states,
            num_drafts, late=self._flight is not None,
        )  # fmt: skip

    def _land(self) -> None:
        """Read the round in flight, if there is one, and do what follows from it."""
        if self._flight is None:
            return
        entries, failed = commit_flight(self.speculative_step, self.batch, self._flight)
        self._flight = None
        if failed:
            self._host_next = "no token"  # which the host looks into, without drafts
        self._finish_who_ended(ScheduledStep(tuple(entries)))
