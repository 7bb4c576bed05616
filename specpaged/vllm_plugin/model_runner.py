"""One step under vLLM: score -> verify -> commit -> propose, with the engine's own parts.

vLLM schedules the drafts of one step in the next one, so that proposing comes last here. What the scheduler lends and
says stays with `Sequences`; what a step returns is `outputs`.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from specpaged.drafting.base import Drafter, DraftOutput, DraftRow
from specpaged.engine.prompt_logprobs import record_prompt_logprobs
from specpaged.engine.scheduler import ScheduledSequence
from specpaged.engine.scoring import score
from specpaged.engine.sequence import Sequence
from specpaged.metrics import EngineMetrics
from specpaged.modeling.forward_output import Argmax
from specpaged.modeling.model_runner import ModelRunner
from specpaged.paging.page_table import DRAFT, TARGET
from specpaged.sampling import get_sampling_batch
from specpaged.sampling.batch import SamplingBatch
from specpaged.sampling.logprobs import TokenLogprobs
from specpaged.sampling.processors import SamplingRequest
from specpaged.verification import get_verifier
from specpaged.verification.base import VerifyOutput
from specpaged.vllm_plugin.grammar import apply_grammar
from specpaged.vllm_plugin.metrics import MetricsExport
from specpaged.vllm_plugin.outputs import logprobs_lists, prompt_logprobs_tensors
from specpaged.vllm_plugin.sequences import Sequences

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput

logger = init_logger(__name__)


@dataclass(frozen=True)
class _Scored:
    """A step between its two calls: vLLM makes up the grammars' bitmask in between."""

    scheduled: SchedulerOutput
    entries: list[ScheduledSequence]
    drafts: list[list[int]]  # of the entries that sample
    sampling: SamplingBatch
    logits: Tensor | Argmax
    prompt_logits: dict[Sequence, Tensor]


class SpecPagedModelRunner:
    """Runs what vLLM's scheduler says, on its blocks."""

    def __init__(
        self,
        target: ModelRunner,
        drafter: Drafter | None,
        sequences: Sequences,
        vocab_size: int,
        fills_cached_blocks: bool,
        metrics_export: MetricsExport | None = None,
        agree: Callable[[list[list[int]]], list[list[int]]] | None = None,
    ):
        self.target = target
        self.drafter = drafter
        self.sequences = sequences
        self.vocab_size = vocab_size
        self.fills_cached_blocks = fills_cached_blocks  # the draft runs whatever may be shared
        self.metrics = EngineMetrics()
        self.metrics_export = metrics_export
        self.agree = agree  # on drafts, among ranks that verify them together
        backend = target.model.backend
        self.verifier = get_verifier("coupled", backend)
        self.sampling_batch = get_sampling_batch(backend)
        self._scored: _Scored | None = None
        self._proposed: list[Sequence] = []  # those of the last step

    @torch.inference_mode()
    def execute(self, scheduled: SchedulerOutput) -> None:
        """Run the target over the step. `sample` is to follow if anything was scheduled."""
        with self.metrics.stage("schedule"):
            entries, drafts = self.sequences.update(scheduled)
            if not entries:
                return
            sampling = self._sampling([entry.sequence.sampling_request for entry in entries if entry.samples])
        has_grammar = any(entry.samples and entry.sequence in self.sequences.has_grammar for entry in entries)
        argmax = sampling.takes_argmax and not sampling.wants_logprobs and not has_grammar
        with self.metrics.stage("score"):
            logits, prompt_logits = score(self.target, entries, drafts, self.vocab_size, argmax)
        self._scored = _Scored(scheduled, entries, drafts, sampling, logits, prompt_logits)

    @torch.inference_mode()
    def sample(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """Verify the step, commit what stands of it, and propose for the next one."""
        step, self._scored = self._scored, None
        stage = self.metrics.stage
        with stage("verify"):
            if grammar is not None:
                step = self._under_grammar(step, grammar)
            draft = DraftOutput(step.drafts, [None] * len(step.drafts))
            verified = self.verifier.verify(step.logits, draft, step.sampling)
            verified, num_nans = self._without_failures(step, verified)
        with stage("commit"):
            self._commit(step, verified)
        with stage("propose"):
            self._propose(step, verified)
        if self.metrics_export is not None:
            self.metrics_export.update(self.metrics)
        return self._output(step, verified, num_nans)

    def take_drafts(self) -> DraftTokenIds:
        """The drafts of the last step's sequences, for the scheduler."""
        drafts = [self.sequences.drafts.get(sequence, []) for sequence in self._proposed]
        return DraftTokenIds([sequence.request_id for sequence in self._proposed], drafts)

    def check_integrity(self) -> None:
        """See Sequences and PagedKVCache."""
        self.sequences.check_integrity()
        self.target.kv_cache.check_integrity()

    def _sampling(self, requests: SequenceOf[SamplingRequest]) -> SamplingBatch:
        return self.sampling_batch(requests, self.vocab_size, self.target.model.device)

    def _under_grammar(self, step: _Scored, grammar: GrammarOutput) -> _Scored:
        """The step with its token masks, without drafts that no grammar has seen."""
        sampled = [entry.sequence.request_id for entry in step.entries if entry.samples]
        scheduled = step.scheduled.scheduled_spec_decode_tokens
        logits, drafts, requests = apply_grammar(
            step.logits,
            step.drafts,
            step.sampling.requests,
            {request_id: i for i, request_id in enumerate(sampled)},
            {request_id: len(draft) for request_id, draft in scheduled.items()},
            1 + self.sequences.max_draft_tokens,
            grammar,
        )
        return replace(step, logits=logits, drafts=drafts, sampling=self._sampling(requests))

    def _without_failures(self, step: _Scored, verified: VerifyOutput) -> tuple[VerifyOutput, dict[str, int]]:
        """Every sequence has an output token; those that have a made-up one, by id.

        NaN in a draft's own KV spoils the rows before it, though they may not read it, and plain decoding would not
        have run it: so who fails runs once more without drafts, and drafts no more. vLLM has no way to fail a single
        request: one that still has no token gets its end-of-text token, if it has one.
        """
        if not any(verified.failed):
            return verified, {}
        sampled = [entry for entry in step.entries if entry.samples]
        num_nans: dict[str, int] = {}
        verified = replace(verified, **{name: list(getattr(verified, name)) for name in verified.__dataclass_fields__})
        for i, entry in enumerate(sampled):
            if not verified.failed[i]:
                continue
            sequence = entry.sequence
            if step.drafts[i] and sequence not in step.prompt_logits:
                sequence.max_draft_tokens = 0
                alone = replace(entry, num_draft_tokens=0)
                logits, _ = score(self.target, [alone], [[]], self.vocab_size, argmax=False)
                again = self.verifier.verify(
                    logits, DraftOutput([[]], [None]), self._sampling([step.sampling.requests[i]])
                )
                verified.token_ids[i], verified.num_accepted[i] = again.token_ids[0], 0
                verified.failed[i], verified.logprobs[i] = again.failed[0], again.logprobs[0]
            if verified.failed[i]:
                token_id = next(iter(sequence.sampling_request.stop_ids), 0)
                verified.token_ids[i].append(token_id)
                num_nans[sequence.request_id] = 1
                if verified.logprobs[i] is not None:
                    verified.logprobs[i].append(TokenLogprobs(token_id, float("-inf"), 1, []))
                logger.error(
                    "request %s: the logits of output token %d hold NaN or allow no token; it gets token %d",
                    sequence.request_id,
                    len(sequence.output_token_ids) + len(verified.token_ids[i]) - 1,
                    token_id,
                )
        return verified, num_nans

    def _commit(self, step: _Scored, verified: VerifyOutput) -> None:
        """Append what was verified, and truncate both pools behind it."""
        metrics, results = self.metrics, zip(verified.token_ids, verified.num_accepted, strict=True)
        metrics.steps += 1
        metrics.rounds += any(entry.samples for entry in step.entries)
        metrics.unverified_kv_tokens = sum(entry.num_draft_tokens for entry in step.entries)
        for entry in step.entries:
            sequence, table, k, num_accepted = entry.sequence, entry.sequence.page_table, entry.num_draft_tokens, 0
            num_known = entry.context_len + entry.num_new_tokens
            if sequence in step.prompt_logits:
                record_prompt_logprobs(sequence, step.prompt_logits[sequence])
            if entry.samples:
                token_ids, num_accepted = next(results)
                for token_id in token_ids:
                    sequence.append(token_id)
                metrics.emitted_tokens += len(token_ids)
            table.advance(TARGET, entry.num_new_tokens + k)
            if k:
                metrics.record_draft(k, num_accepted)
            if num_accepted < k:
                metrics.rollbacks += 1
                metrics.rolled_back_tokens += k - num_accepted
                metrics.rollback_blocks_freed += sum(
                    place % table.block_size == 0 for place in range(num_known + num_accepted, num_known + k)
                )
                table.truncate(TARGET, num_known + num_accepted)
            if len(table.context_lens) > DRAFT:
                table.truncate(DRAFT, min(table.context_lens[DRAFT], num_known + num_accepted))

    def _propose(self, step: _Scored, verified: VerifyOutput) -> None:
        if self.drafter is None:
            return
        rows: list[DraftRow] = []
        drafting: list[Sequence] = []
        outputs = iter(verified.token_ids)
        for entry in step.entries:
            sequence, k = entry.sequence, 0
            if entry.samples:
                useful = self.sequences.num_useful_draft_tokens(sequence, next(outputs))
                k = max(0, min(step.scheduled.num_spec_tokens_to_schedule, useful))
            row = self._draft_row(entry, k, len(drafting))
            if row is not None:
                rows.append(row)
            if k > 0:
                drafting.append(sequence)
        sampling = self._sampling([sequence.sampling_request for sequence in drafting])
        draft = self.drafter.propose(rows, sampling, len(drafting)) if rows else DraftOutput.empty(0)
        for entry in step.entries:
            self.sequences.drafts.pop(entry.sequence, None)
        token_ids = draft.token_ids if self.agree is None else self.agree(draft.token_ids)
        self.sequences.drafts.update(zip(drafting, token_ids, strict=True))
        self._proposed = [entry.sequence for entry in step.entries]

    def _draft_row(self, entry: ScheduledSequence, k: int, request_idx: int) -> DraftRow | None:
        """What the drafter has to do for a sequence that has just been committed; its KV counts as written."""
        sequence, table = entry.sequence, entry.sequence.page_table
        if len(table.context_lens) <= DRAFT:
            return DraftRow((), 0, (), k, request_idx) if k > 0 else None
        start = table.context_lens[DRAFT]
        # What will be drafted upon, in chunks as the target; and whatever another request may find in the cache.
        if k > 0:
            end = sequence.num_tokens
        elif self.fills_cached_blocks or (not entry.samples and sequence.max_draft_tokens > 0):
            end = table.context_lens[TARGET]
        else:
            return None
        if end <= start:
            return None
        table.advance(DRAFT, end + max(0, k - 1) - start)
        return DraftRow(sequence.token_ids[start:end], start, table.entries, k, request_idx)

    def _output(self, step: _Scored, verified: VerifyOutput, num_nans: dict[str, int]) -> ModelRunnerOutput:
        outputs, logprobs = iter(verified.token_ids), iter(verified.logprobs)
        token_ids = [next(outputs) if entry.samples else [] for entry in step.entries]
        of_tokens = [next(logprobs) if entry.samples else None for entry in step.entries]
        prompt_logprobs = {}
        for entry in step.entries:
            sequence = entry.sequence
            if entry.samples and sequence in self.sequences.owes_prompt_logprobs:
                self.sequences.owes_prompt_logprobs.discard(sequence)
                if sequence.prompt_logprobs is not None:  # a single token has none
                    prompt_logprobs[sequence.request_id] = prompt_logprobs_tensors(sequence.prompt_logprobs[1:])
        request_ids = [entry.sequence.request_id for entry in step.entries]
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(request_ids)},
            sampled_token_ids=token_ids,
            logprobs=logprobs_lists(token_ids, of_tokens),
            prompt_logprobs_dict=prompt_logprobs,
            num_nans_in_logits=num_nans or None,
        )
