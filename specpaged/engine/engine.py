"""The engine: schedule -> propose -> score -> verify -> commit."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from specpaged.config import EngineConfig
from specpaged.drafting.base import Drafter, DraftOutput, DraftRow
from specpaged.engine.kv_layout import KVLayout
from specpaged.engine.prompt_logprobs import record_prompt_logprobs
from specpaged.engine.request import Request, validate_request
from specpaged.engine.scheduler import ScheduledSequence, ScheduledStep, Scheduler
from specpaged.engine.scoring import score
from specpaged.engine.sequence import Sequence, derived_seed
from specpaged.engine.stop_checker import StopChecker
from specpaged.metrics import EngineMetrics
from specpaged.modeling.model_runner import ModelRunner
from specpaged.outputs import RequestOutput
from specpaged.paging.block_allocator import BlockAllocator
from specpaged.paging.page_table import DRAFT, TARGET, PageTable
from specpaged.paging.prefix_cache import PrefixCache
from specpaged.sampling import get_sampling_batch
from specpaged.sampling.batch import SamplingBatch
from specpaged.sampling.request import SamplingRequest
from specpaged.sampling_params import SamplingParams, bad_words_token_ids
from specpaged.verification import get_verifier
from specpaged.verification.base import VerifyOutput


@dataclass(frozen=True)
class Vocabulary:
    """What the engine knows of tokens: how many, which ones end a text, and how to read them (if it does)."""

    size: int
    eos_token_ids: tuple[int, ...]
    tokenizer: object | None


class Engine:
    """Runs requests to their end, step by step, over a target and (with speculation) a drafter.

    Blocks belong to this engine's allocator; models, drafter and verifier get page tables, lengths and tokens
    as values. `config.max_model_len` is resolved (an int).
    """

    def __init__(
        self,
        config: EngineConfig,
        vocabulary: Vocabulary,
        target: ModelRunner,
        draft: ModelRunner | None,
        drafter: Drafter | None,
        scheduler: Callable[..., Scheduler],
        kv_layout: KVLayout | None = None,
    ):
        self.config = config
        self.vocabulary = vocabulary
        self.target = target
        self.draft = draft
        self.drafter = drafter
        self.kv_layout = kv_layout or KVLayout(config.block_size)
        self.metrics = EngineMetrics()
        speculative = config.speculative_config if drafter is not None else None
        self.max_draft_tokens = speculative.max_draft_tokens if speculative else 0
        self.num_pools = 2 if draft is not None else 1
        backend = target.model.backend
        self.verifier = get_verifier(speculative.verification if speculative else "coupled", backend)
        self.sampling_batch = get_sampling_batch(backend)
        num_slots = target.kv_cache.num_slots
        if num_slots < config.max_model_len:
            raise ValueError(
                f"target.kv_cache has {num_slots} slots; allowed: max_model_len={config.max_model_len} or more"
            )
        self.allocator = BlockAllocator(target.kv_cache.num_blocks)
        self.prefix_cache = PrefixCache(self.allocator, config.block_size) if config.enable_prefix_caching else None
        self.scheduler = scheduler(
            self.allocator,
            block_size=self.kv_layout.tokens_per_block,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            speculative_config=speculative,
            prefix_cache=self.prefix_cache,
        )
        self.requests: dict[str, Request] = {}
        self._num_seeds_derived = 0
        self._counted: dict[str, int] = {}  # see _count_parts

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: SequenceOf[int],
        params: SamplingParams,
        prompt: str | None = None,
    ) -> None:
        """Queue a request. Nothing is queued if this raises.

        Raises:
            ValueError: naming the argument, its value and what is allowed.
        """
        if request_id in self.requests:
            raise ValueError(f"request_id={request_id!r} is in use; allowed: an id that no running request has")
        validate_request(
            prompt_token_ids,
            params,
            vocab_size=self.vocabulary.size,
            has_tokenizer=self.vocabulary.tokenizer is not None,
            max_model_len=self.config.max_model_len,
            max_draft_tokens=self.max_draft_tokens,
            verification=self.verifier.name,
        )
        max_draft_tokens = self.max_draft_tokens
        if params.num_speculative_tokens is not None:
            max_draft_tokens = params.num_speculative_tokens
        stop_ids = {*self.vocabulary.eos_token_ids, *params.stop_token_ids}
        bad_words = ()
        if params.bad_words:
            bad_words = bad_words_token_ids(params, self.vocabulary.tokenizer, self.vocabulary.size)
        seed = params.seed if params.seed is not None else self._derive_seed()
        sequences = []
        for child in range(params.n):
            # A request that never drafts needs no draft KV: its page table has one pool.
            table = self.kv_layout.new_table(self.allocator, self.num_pools if max_draft_tokens else 1)
            child_seed = (seed + child) % 2**64
            sequence = Sequence(
                request_id, list(prompt_token_ids), params, child_seed, table, max_draft_tokens, child_idx=child
            )
            sequence.sampling_request = SamplingRequest.of(sequence, stop_ids, bad_words)
            sequence.stop_checker = StopChecker(
                params,
                self.vocabulary.eos_token_ids,
                self.vocabulary.tokenizer,
                max_output_tokens=self.config.max_model_len - len(prompt_token_ids),
                prompt_token_ids=sequence.prompt_token_ids,
            )
            sequence.fork_source = sequences[0] if sequences and self.kv_layout.shares_blocks else None
            sequences.append(sequence)
        self.requests[request_id] = Request(request_id, prompt, sequences)
        self.metrics.prompt_tokens += len(prompt_token_ids)
        for sequence in sequences:
            self.scheduler.add(sequence)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request now and free its blocks; its output so far, or None if no such request runs."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return None
        for sequence in request.sequences:
            if not sequence.is_finished:
                self._finish(sequence, "abort")
        return request.output(self.vocabulary.tokenizer)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether another step would do anything."""
        return len(self.scheduler) > 0

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Run one step; the outputs of the requests that ended in it."""
        stage = self.metrics.stage
        with stage("schedule"):
            scheduled = self.scheduler.schedule()
            self._copy_forks(scheduled)
            sampling = self.sampling_batch(
                [entry.sequence.sampling_request for entry in scheduled.entries if entry.samples],
                self.vocabulary.size,
                self.target.model.device,
            )
        if not scheduled.entries:
            if self.has_unfinished_requests:
                raise RuntimeError(f"no sequence can run, and {len(self.scheduler)} wait: {list(self.scheduler)}")
            return []
        self._place(scheduled)
        with stage("propose"):
            draft = self._propose(scheduled, sampling)
        with stage("score"):
            argmax = sampling.takes_argmax and not sampling.wants_logprobs
            logits, prompt_logits = score(self.target, scheduled.entries, draft.token_ids, self.vocabulary.size, argmax)
        with stage("verify"):
            verified = self.kv_layout.limit(self.verifier.verify(logits, draft, sampling))
        with stage("commit"):
            return self._commit(scheduled, draft, verified, prompt_logits)

    def check_integrity(self) -> None:
        """Free + held == total, and every block held is held by a sequence of this engine."""
        self.scheduler.check_integrity()
        self.kv_layout.check_integrity()
        if self.prefix_cache is not None:
            self.prefix_cache.check_integrity()
        for runner in (self.target, self.draft):
            if runner is not None:
                runner.kv_cache.check_integrity()

    def _derive_seed(self) -> int:
        self._num_seeds_derived += 1
        return derived_seed(self.config.seed, self._num_seeds_derived - 1)

    def _copy_forks(self, scheduled: ScheduledStep) -> None:
        if scheduled.forks:
            for runner in (self.target, self.draft):
                if runner is not None:
                    self.metrics.fork_copied_bytes += runner.kv_cache.copy_blocks(scheduled.forks)

    def _place(self, scheduled: ScheduledStep) -> None:
        start = time.perf_counter()
        self.kv_layout.place(scheduled.entries)
        self.metrics.rollback_seconds += time.perf_counter() - start

    def _propose(self, scheduled: ScheduledStep, sampling: SamplingBatch) -> DraftOutput:
        num_requests = sum(entry.samples for entry in scheduled.entries)
        if self.drafter is None:
            return DraftOutput.empty(num_requests)
        rows, request_idx = [], 0
        for entry in scheduled.entries:
            row = _draft_row(entry, request_idx)
            request_idx += entry.samples
            if row is not None:
                rows.append(row)
        return self.drafter.propose(rows, sampling, num_requests) if rows else DraftOutput.empty(num_requests)

    def _commit(
        self,
        scheduled: ScheduledStep,
        draft: DraftOutput,
        verified: VerifyOutput,
        prompt_logits: dict[Sequence, Tensor],
    ) -> list[RequestOutput]:
        """Append what was verified, truncate both pools behind it, end what has ended."""
        metrics = self.metrics
        num_drafted = [len(token_ids) for token_ids in draft.token_ids]
        metrics.steps += 1
        metrics.rounds += any(entry.samples for entry in scheduled.entries)
        metrics.unverified_kv_tokens = sum(num_drafted)
        metrics.peak_unverified_kv_tokens = max(metrics.peak_unverified_kv_tokens, sum(num_drafted))
        metrics.blocks_in_use = self.allocator.num_held
        metrics.peak_blocks_in_use = max(metrics.peak_blocks_in_use, self.allocator.num_held)
        finished: list[Sequence] = []
        rollbacks: list[tuple[Sequence, int, int, int]] = []  # see _roll_back
        results = zip(
            num_drafted, verified.token_ids, verified.num_accepted, verified.failed, verified.logprobs, strict=True
        )
        for entry in scheduled.entries:
            sequence, k = entry.sequence, 0
            num_known = entry.context_len + entry.num_new_tokens
            if sequence in prompt_logits:
                record_prompt_logprobs(sequence, prompt_logits[sequence])
            if entry.samples:
                k, token_ids, num_accepted, failed, logprobs = next(results)
                sequence.metrics.rounds += 1
                if k:
                    sequence.metrics.record_draft(k, num_accepted)
                    metrics.record_draft(k, num_accepted)
                num_emitted = sequence.emit(token_ids, logprobs)
                metrics.emitted_tokens += num_emitted
                failed = failed and sequence.finish_reason is None
                kept = min(num_accepted, num_emitted)
                again = failed and k > 0 and sequence not in prompt_logits
                if again:
                    # NaN in a draft's own KV spoils the rows before it, though they may not read it, and plain
                    # decoding would not have run it: once more without drafts, and none from here on.
                    sequence.max_draft_tokens = 0
                    rollbacks.append((sequence, entry.context_len, entry.context_len, entry.num_new_tokens + k))
                elif kept < k:
                    # target wrote    T + K       keeps T + a            (the new bonus token has no KV yet)
                    # draft wrote     T + K - 1   keeps T + min(a, K-1)  (d_K was never run)
                    rollbacks.append((sequence, num_known + kept, num_known + min(kept, k - 1), k - kept))
                if failed and not again:
                    sequence.error = (
                        f"request {sequence.request_id!r}: the logits of output token "
                        f"{len(sequence.output_token_ids)} hold NaN or allow no token"
                    )
                if sequence.finish_reason is not None or sequence.error is not None:
                    finished.append(sequence)
            sequence.page_table.advance(TARGET, entry.num_new_tokens + k)
            if _runs_draft(entry):
                _advance_draft(sequence.page_table, num_known + max(0, k - 1))
        self._roll_back(rollbacks)
        for entry in scheduled.entries:
            # Not before the sequence samples: its logits are the first to show a NaN in any of its KV.
            if self.prefix_cache is not None and entry.samples and entry.sequence.error is None:
                self._publish(entry.sequence)
        for sequence in finished:
            self._finish(sequence, sequence.finish_reason or "error")
        self._realign()
        self._count_parts()
        return self._collect(finished)

    def _count_parts(self) -> None:
        """Add to the metrics what the engine's parts have counted since the last time: theirs go on for life."""
        runners = [runner for runner in (self.target, self.draft) if runner is not None]
        scheduler, copied = self.scheduler, self.kv_layout.copied
        totals = {
            "preemptions": scheduler.num_preemptions,
            "grouped_rounds": scheduler.num_grouped_rounds,
            "fallback_rounds": scheduler.num_fallback_rounds,
            "rollback_bytes": copied.rollback,
            "gathered_bytes": copied.gather + sum(runner.gathered_bytes for runner in runners),
            "other_copied_bytes": copied.other,
            "filler_rows": sum(runner.filler_rows for runner in runners),
        }
        for name, total in totals.items():
            setattr(self.metrics, name, getattr(self.metrics, name) + total - self._counted.get(name, 0))
        self._counted = totals

    def _roll_back(self, rollbacks: SequenceOf[tuple[Sequence, int, int, int]]) -> None:
        """Truncate both pools of each (sequence, target's new context, draft's at most, tokens taken back)."""
        start = time.perf_counter()
        num_blocks = 0
        for sequence, target_len, draft_len, _ in rollbacks:
            table = sequence.page_table
            num_blocks += table.truncate(TARGET, target_len)
            if len(table.context_lens) > DRAFT:
                num_blocks += table.truncate(DRAFT, min(draft_len, table.context_lens[DRAFT]))
        metrics = self.metrics
        metrics.rollbacks += len(rollbacks)
        metrics.rolled_back_tokens += sum(num_tokens for *_, num_tokens in rollbacks)
        metrics.rollback_blocks_freed += num_blocks
        metrics.rollback_seconds += time.perf_counter() - start

    def _realign(self) -> None:
        start = time.perf_counter()
        self.kv_layout.realign(self.scheduler.running)
        self.metrics.rollback_seconds += time.perf_counter() - start

    def _publish(self, sequence: Sequence) -> None:
        """Offer the sequence's full blocks to the prefix cache, if every pool holds their KV."""
        if len(sequence.page_table.context_lens) == self.num_pools:
            self.prefix_cache.publish(sequence.page_table, sequence.token_ids)

    def _finish(self, sequence: Sequence, reason: str) -> None:
        sequence.finish_reason = reason
        self.scheduler.finish(sequence)

    def _collect(self, finished: SequenceOf[Sequence]) -> list[RequestOutput]:
        """Outputs of the requests whose last sequence has just ended."""
        outputs = []
        for request_id in dict.fromkeys(sequence.request_id for sequence in finished):
            request = self.requests[request_id]
            if request.is_finished:
                del self.requests[request_id]
                outputs.append(request.output(self.vocabulary.tokenizer))
        return outputs


def _draft_row(entry: ScheduledSequence, request_idx: int) -> DraftRow | None:
    """What the drafter has to do for a scheduled sequence; None if nothing."""
    if not _runs_draft(entry):
        return None
    sequence, table = entry.sequence, entry.sequence.page_table
    if len(table.context_lens) <= DRAFT:  # a drafter without KV
        return DraftRow((), 0, (), entry.num_draft_tokens, request_idx)
    start = table.context_lens[DRAFT]
    token_ids = sequence.token_ids[start : entry.context_len + entry.num_new_tokens]
    return DraftRow(token_ids, start, table.entries, entry.num_draft_tokens, request_idx)


def _runs_draft(entry: ScheduledSequence) -> bool:
    """Whether the drafter runs in this step: for drafts, and behind every chunk of a prefill, which may be shared.

    A sequence that decodes with K = 0 is left behind, and caught up with by its next draft.
    """
    if len(entry.sequence.page_table.context_lens) <= DRAFT:
        return entry.num_draft_tokens > 0
    return entry.num_draft_tokens > 0 or entry.num_new_tokens > 1 or not entry.samples


def _advance_draft(table: PageTable, num_tokens: int) -> None:
    if len(table.context_lens) > DRAFT and num_tokens > table.context_lens[DRAFT]:
        table.advance(DRAFT, num_tokens - table.context_lens[DRAFT])
