"""Rounds that the device runs by itself under vLLM's asynchronous scheduling, with the host one round late.

vLLM plans step n + 1 before it has seen the tokens of step n. Where every sequence of a step decodes, the worker does
not have to see them, either: a round drafts and verifies on the device, from the tokens and lengths that the round
before has left there, and what it came to is copied over a stream of its own.

    vLLM      schedule n      schedule n + 1   tokens of n      schedule n + 2   tokens of n + 1
    worker    launch n        launch n + 1  commit n            launch n + 2  commit n + 1
    device    | round n       | round n + 1      | round n + 2 ...

vLLM's other thread waits in `get_output` for the copy of a round, and reads no more than that. All else is the host's
step, behind the round in flight, which is read first: prefills, requests that come back, grammars, and who asks for
what only the host does (`host_reasons`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

from typing_extensions import override
from vllm.logger import init_logger
from vllm.v1.outputs import AsyncModelRunnerOutput

from specpaged.engine.device_batch import DeviceBatch
from specpaged.engine.device_commit import Flight, Outcome, commit_flight
from specpaged.engine.device_launch import launch, row_state, take_over
from specpaged.engine.host_reasons import decodes, why_not
from specpaged.modeling.copies import Copies, copies_of
from specpaged.modeling.cuda_graphs import CudaGraphs, Record, Recorder
from specpaged.modeling.device_round import DeviceRound
from specpaged.modeling.device_state import DeviceState, RowState
from specpaged.vllm_plugin.outputs import StepOutput

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

    from specpaged.config import EngineConfig
    from specpaged.engine.scheduler import ScheduledSequence
    from specpaged.engine.sequence import Sequence
    from specpaged.engine.step import SpeculativeStep
    from specpaged.modeling.model_runner import ModelRunner
    from specpaged.vllm_plugin.sequences import Sequences

logger = init_logger(__name__)


class RoundOutput(AsyncModelRunnerOutput):
    """What a step came to, as soon as its copy is there: every sequence of the step has tokens of that round."""

    def __init__(self, flight: Flight):
        self._flight = flight

    @override
    def get_output(self) -> ModelRunnerOutput:
        """Waits for the copy of the round, and for nothing else of the device. Changes nothing: any thread may ask."""
        rows = self._flight.reading.values().tolist()
        members = zip(self._flight.members, self._flight.rows, strict=True)
        outcomes = {member.sequence: Outcome.of(rows[row]) for member, row in members}
        request_ids = [sequence.request_id for sequence in outcomes]
        made_up = [sequence.request_id for sequence, outcome in outcomes.items() if outcome.is_made_up]
        for request_id in made_up:
            logger.error("request %s: its logits hold NaN or allow no token; it gets its end-of-text token", request_id)
        return StepOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(request_ids)},
            sampled_token_ids=[outcome.token_ids for outcome in outcomes.values()],
            num_nans_in_logits=dict.fromkeys(made_up, 1) or None,
        )


class DeviceRounds:
    """The rounds of a worker's sequences that are the device's, and the one that has been launched and not read.

    `host_steps` counts the other steps, by their reason.
    """

    def __init__(
        self,
        config: EngineConfig,
        step: SpeculativeStep,
        sequences: Sequences,
        draft: ModelRunner | None,
        copies: Copies | None = None,
        record: Record | None = None,
    ):
        target, device = step.target, step.target.model.device
        self.step = step
        self.sequences = sequences
        self.max_model_len = config.max_model_len
        self._is_adaptive = draft is not None and config.speculative_config.is_adaptive
        if step.planner is not None:
            step.planner.leave_to_device(waits=False)
        self.host_steps: Counter[str] = Counter()
        self.copies = copies or copies_of(device)
        self.batch = DeviceBatch(
            DeviceState(config.max_num_seqs, config.max_model_len, sequences.block_size, device, self.copies)
        )
        if record is None and CudaGraphs.why_not(target.model, config.enforce_eager) is None:
            record = Recorder(device)
        num_drafts = sequences.max_draft_tokens if draft is not None else 0
        # vLLM has no way to fail a request, and takes a token of everybody.
        self.round = DeviceRound(self.batch.state, target, draft, step.vocab_size, num_drafts, record, makes_up=True)
        self.flight: Flight | None = None

    def why_host(self, scheduled: SchedulerOutput) -> str | None:
        """Why a step that vLLM has scheduled, and nobody has looked at yet, is not one round of the device's."""
        if scheduled.has_structured_output_requests:
            return "grammar"
        if scheduled.scheduled_new_reqs or scheduled.scheduled_cached_reqs.resumed_req_ids:
            return "prefill"
        for request_id, num_tokens in scheduled.num_scheduled_tokens.items():
            sequence = self.sequences[request_id]
            num_drafts = len(scheduled.scheduled_spec_decode_tokens.get(request_id, ()))
            if num_tokens - num_drafts != 1 or not decodes(sequence):
                return "prefill"
            if sequence not in self.batch.members:
                reason = "prompt logprobs" if sequence in self.sequences.owes_prompt_logprobs else why_not(sequence)
                if reason is not None:
                    return reason
        return None if scheduled.num_scheduled_tokens else "nobody runs"

    def forget(self, gone: SequenceOf[Sequence]) -> None:
        """These have ended, or given up their KV: nothing that comes of them is read any more."""
        for sequence in gone:
            self.batch.remove(sequence)

    def run(self, entries: SequenceOf[ScheduledSequence], scheduled: SchedulerOutput) -> RoundOutput:
        """Launch the round of a step, then commit the round before it, which this waits for."""
        running = [entry.sequence for entry in entries]
        if not self.batch.members.keys() <= set(running):  # whoever has to sit out is owed the tokens of its last round
            self.land()
        given = scheduled.scheduled_spec_decode_tokens
        counts = [min(len(given.get(s.request_id, ())), s.max_draft_tokens) for s in running]
        drafts, num_drafts = [any(counts)] * len(running), self.round.num_drafts
        if self._is_adaptive:  # of as many as vLLM has lent slots for
            counts = list(map(min, counts, self.step.planner.plan_round(running)))
            self.step.planner.dropped()
            drafts, num_drafts = [k > 0 for k in counts], max(counts)
        states = list(map(self._state, running, counts, drafts))
        metrics = self.step.metrics
        with metrics.stage("score"):
            flight = launch(
                self.step, self.batch, self.round, self.copies, running, states, num_drafts,
                late=self.flight is not None,
            )  # fmt: skip
        self.land()
        self.flight = flight
        return RoundOutput(flight)

    def land(self) -> None:
        """Commit the round in flight, if there is one; waits for it."""
        if self.flight is None:
            return
        flight, self.flight = self.flight, None
        commit_flight(self.step, self.batch, flight)
        # Of all that were in it: who has ended since is passed over by what is kept of blocks.
        here = set(self.sequences)
        self.sequences.note_draft_kv([m.sequence for m in flight.members if m.sequence in here])

    def check_integrity(self) -> None:
        """IntegrityError where the device has anything else than what the host knows; waits for it."""
        self.batch.check_integrity(is_ahead=self.flight is not None)

    def _state(self, sequence: Sequence, num_drafts: int, drafts: bool) -> RowState:
        """vLLM has lent blocks for all that the step may write; whatever it asks for, no round writes behind them."""
        take_over(sequence)
        limit = min(
            self.max_model_len,
            sequence.page_table.capacity + 1,  # the last token of all has no KV
            sequence.num_prompt_tokens + sequence.params.max_tokens,
        )
        return row_state(sequence, limit, num_drafts, drafts, end_id=next(iter(sequence.sampling_request.stop_ids), 0))
