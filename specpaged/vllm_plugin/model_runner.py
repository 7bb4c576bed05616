"""The host that vLLM's scheduler makes of a SpeculativeStep: conversion of what comes in and goes out.

vLLM schedules the drafts of one step in the next one. What the scheduler lends and says stays with `Sequences`; what a
step returns is `outputs`.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds, ModelRunnerOutput

from specpaged.drafting.base import DraftOutput
from specpaged.engine.followers import admits, give_up, keeps_lookups
from specpaged.engine.sequence import Sequence
from specpaged.engine.step import ScoredStep, SpeculativeStep
from specpaged.metrics import EngineMetrics
from specpaged.sampling.logprobs import TokenLogprobs
from specpaged.speculation.cost_model import CostModel
from specpaged.verification.base import VerifyOutput
from specpaged.vllm_plugin.grammar import apply_grammar
from specpaged.vllm_plugin.metrics import MetricsExport
from specpaged.vllm_plugin.outputs import StepOutput, logprobs_lists, prompt_logprobs_tensors
from specpaged.vllm_plugin.sequences import Sequences

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput

    from specpaged.vllm_plugin.device_rounds import DeviceRounds, RoundOutput

logger = init_logger(__name__)


class SpecPagedModelRunner:
    """Runs what vLLM's scheduler says, on its blocks. `asynchronous` is whether steps are planned ahead.

    With `rounds`, which need that, steps in which everybody decodes are the device's, and are read one step later.
    """

    def __init__(
        self,
        speculative_step: SpeculativeStep,
        sequences: Sequences,
        metrics_export: MetricsExport | None = None,
        asynchronous: bool = False,
    ):
        self.speculative_step = speculative_step
        self.sequences = sequences
        self.metrics_export = metrics_export
        self.asynchronous = asynchronous
        self.rounds: DeviceRounds | None = None
        # A step between its two calls, where vLLM makes up the grammars' bitmask in between.
        self._scored: ScoredStep | None = None
        self._scheduled: SchedulerOutput | None = None
        self._round: RoundOutput | None = None  # likewise, where the device runs the step by itself
        self._drafted: list[Sequence] = []  # those of the last step, drafts or not

    @property
    def metrics(self) -> EngineMetrics:
        """Totals since the worker started."""
        return self.speculative_step.metrics

    @property
    def costs(self) -> CostModel | None:
        """What passes take, where it decides how much is drafted."""
        planner = self.speculative_step.planner
        return None if planner is None else planner.costs

    @property
    def has_step(self) -> bool:
        """Whether `sample` is to follow."""
        return self._scored is not None or self._round is not None

    @torch.inference_mode()
    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run the target over the step, and all the rest of it where nothing is to be waited for.

        None where `sample` is to follow: a grammar's bitmask comes with it, and asynchronous scheduling asks for it.
        """
        host_reason = None
        if self.rounds is not None:
            host_reason = self.rounds.why_host(scheduled)
            if host_reason is not None:
                self.rounds.host_steps[host_reason] += 1
                self.rounds.land()
        with self.metrics.stage("schedule"):
            entries, gone = self.sequences.update(scheduled)
            for sequence in gone:
                self.speculative_step.forget(sequence)
            if self.rounds is not None:
                self.rounds.forget(gone)
            for sequence in self.sequences.new:
                if sequence.max_draft_tokens and not admits(self.speculative_step.planner):
                    give_up(sequence, keeps_lookups(self.speculative_step.planner))
        if not entries:
            return EMPTY_MODEL_RUNNER_OUTPUT
        if self.rounds is not None and host_reason is None:
            self._round, self._drafted = self.rounds.run(entries, scheduled), []
            return None
        has_grammar = any(entry.samples and entry.sequence in self.sequences.has_grammar for entry in entries)
        self._scheduled = scheduled
        self._scored = self.speculative_step.score(entries, takes_argmax=not has_grammar)
        if self.asynchronous or scheduled.has_structured_output_requests:
            return None
        return self.sample(None)

    @torch.inference_mode()
    def sample(self, grammar: GrammarOutput | None) -> ModelRunnerOutput | RoundOutput:
        """Verify the step, commit what stands of it, and propose for the next one.

        Of a step that the device runs, what it will have come to: nobody waits for it here.
        """
        if self._round is not None:
            output, self._round = self._round, None
            self._export_metrics()
            return output
        scored, self._scored = self._scored, None
        scheduled, self._scheduled = self._scheduled, None
        if grammar is not None:
            scored = self._under_grammar(scored, scheduled, grammar)
        verified, num_nans = self._without_failures(scored, self.speculative_step.verify(scored))
        self.speculative_step.commit(scored, verified)
        self._go_on(scored)
        newest = {e.sequence: ids for e, ids in zip(scored.sampling_entries, verified.token_ids, strict=True)}

        def reserve(sequences: SequenceOf[Sequence], wanted: SequenceOf[int] | None) -> list[int]:
            useful = (self.sequences.num_useful_draft_tokens(sequence, newest[sequence]) for sequence in sequences)
            counts = [max(0, min(scheduled.num_spec_tokens_to_schedule, count)) for count in useful]
            return counts if wanted is None else list(map(min, counts, wanted))

        self.speculative_step.propose(scored, reserve)
        self._drafted = [entry.sequence for entry in scored.entries]
        self.sequences.note_draft_kv(self._drafted)
        self._export_metrics()
        return self._output(scored, verified, num_nans)

    def take_drafts(self) -> DraftTokenIds:
        """The drafts of the last step's sequences, for the scheduler."""
        drafts = [list(sequence.draft.token_ids) for sequence in self._drafted]
        return DraftTokenIds([sequence.request_id for sequence in self._drafted], drafts)

    def check_integrity(self) -> None:
        """IntegrityError where a page table or a pool is not as it is to be."""
        self.sequences.check_integrity()
        self.speculative_step.check_integrity()
        if self.rounds is not None:
            self.rounds.check_integrity()

    def _export_metrics(self) -> None:
        if self.metrics_export is not None:
            self.metrics_export.update(self.metrics)

    def _under_grammar(self, scored: ScoredStep, scheduled: SchedulerOutput, grammar: GrammarOutput) -> ScoredStep:
        """The step with its token masks, without drafts that no grammar has seen."""
        sampled = [entry.sequence.request_id for entry in scored.sampling_entries]
        logits, drafts, requests = apply_grammar(
            scored.logits,
            scored.drafts.token_ids,
            scored.sampling.requests,
            {request_id: i for i, request_id in enumerate(sampled)},
            {request_id: len(draft) for request_id, draft in scheduled.scheduled_spec_decode_tokens.items()},
            1 + self.sequences.max_draft_tokens,
            grammar,
        )
        return replace(
            scored,
            logits=logits,
            drafts=DraftOutput(drafts, scored.drafts.probs),
            sampling=self.speculative_step.sampling(requests),
        )

    def _without_failures(self, scored: ScoredStep, verified: VerifyOutput) -> tuple[VerifyOutput, dict[str, int]]:
        """Every sequence has an output token; how many were made up, by request id.

        vLLM has no way to fail a single request: one that has no token gets its end-of-text token, if it has one.
        """
        if not any(verified.failed):
            return verified, {}
        num_nans: dict[str, int] = {}
        token_ids, logprobs = list(verified.token_ids), list(verified.logprobs)
        for i, entry in enumerate(scored.sampling_entries):
            if not verified.failed[i]:
                continue
            sequence = entry.sequence
            token_id = next(iter(sequence.sampling_request.stop_ids), 0)
            num_nans[sequence.request_id] = 1
            if logprobs[i] is not None:
                logprobs[i] = [*logprobs[i], TokenLogprobs(token_id, float("-inf"), 1, [])]
            logger.error(
                "request %s: the logits of output token %d hold NaN or allow no token; it gets token %d",
                sequence.request_id,
                len(sequence.output_token_ids) + len(token_ids[i]),
                token_id,
            )
            token_ids[i] = [*token_ids[i], token_id]
        return replace(verified, token_ids=token_ids, logprobs=logprobs), num_nans

    def _go_on(self, scored: ScoredStep) -> None:
        """Who cannot be given its prompt's log-probabilities goes on without: vLLM has its token, and awaits more."""
        for entry in scored.entries:
            sequence = entry.sequence
            if sequence.error is not None:
                sequence.error = sequence.prompt_logprobs = None
                self.sequences.owes_prompt_logprobs.discard(sequence)

    def _output(self, scored: ScoredStep, verified: VerifyOutput, num_nans: dict[str, int]) -> ModelRunnerOutput:
        outputs, logprobs = iter(verified.token_ids), iter(verified.logprobs)
        token_ids = [next(outputs) if entry.samples else [] for entry in scored.entries]
        of_tokens = [next(logprobs) if entry.samples else None for entry in scored.entries]
        prompt_logprobs = {}
        for entry in scored.entries:
            sequence = entry.sequence
            if entry.samples and sequence in self.sequences.owes_prompt_logprobs:
                self.sequences.owes_prompt_logprobs.discard(sequence)
                if sequence.prompt_logprobs is not None:  # a single token has none
                    prompt_logprobs[sequence.request_id] = prompt_logprobs_tensors(sequence.prompt_logprobs[1:])
        request_ids = [entry.sequence.request_id for entry in scored.entries]
        return StepOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(request_ids)},
            sampled_token_ids=token_ids,
            logprobs=logprobs_lists(token_ids, of_tokens),
            prompt_logprobs_dict=prompt_logprobs,
            num_nans_in_logits=num_nans or None,
            drafts=self.take_drafts() if self.sequences.max_draft_tokens else None,
        )
