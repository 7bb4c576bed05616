"""The engine: schedule -> score -> verify -> commit -> propose."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import torch

from specpaged.config import EngineConfig
from specpaged.drafting.base import Drafter
from specpaged.engine.draft_planner import DraftPlanner
from specpaged.engine.followers import admits, give_up, keeps_lookups
from specpaged.engine.kv_layout import KVLayout
from specpaged.engine.recovery import Recovery, score_and_verify
from specpaged.engine.request import Request, validate_request
from specpaged.engine.scheduler import ScheduledStep, Scheduler
from specpaged.engine.sequence import Sequence, derived_seed
from specpaged.engine.step import ScoredStep, SpeculativeStep
from specpaged.engine.vocabulary import Vocabulary
from specpaged.metrics import EngineMetrics, PartCounts
from specpaged.modeling.model_runner import ModelRunner
from specpaged.outputs import RequestOutput
from specpaged.paging.block_allocator import BlockAllocator, IntegrityError
from specpaged.paging.prefix_cache import PrefixCache
from specpaged.sampling.request import SamplingRequest
from specpaged.sampling_params import SamplingParams
from specpaged.verification.base import VerifyOutput

logger = logging.getLogger("specpaged")


class Engine:
    """Runs requests to their end, step by step, over a target and (with speculation) a drafter.

    Blocks belong to this engine's allocator; models, drafter and verifier get page tables, lengths and tokens
    as values. `config.max_model_len` is resolved (an int). `scheduler` makes the scheduler, of ContinuousScheduler's
    arguments; `kv_layout` is how sequences hold KV; `planner` decides K where the configuration does not.
    """

    def __init__(
        self,
        config: EngineConfig,
        vocabulary: Vocabulary,
        target: ModelRunner,
        draft: ModelRunner | None,
        drafter: Drafter | None,
        scheduler: Callable[..., Scheduler],
        kv_layout: KVLayout,
        planner: DraftPlanner | None = None,
    ):
        self.config = config
        self.vocabulary = vocabulary
        self.target = target
        self.draft = draft
        self._runners = [target] if draft is None else [target, draft]
        self.kv_layout, self.num_pools = kv_layout, len(self._runners)
        speculative = config.speculative_config if drafter is not None else None
        self.max_draft_tokens = speculative.max_draft_tokens if speculative else 0
        if (num_slots := target.kv_cache.num_slots) < config.max_model_len:
            raise ValueError(f"target.kv_cache has {num_slots} slots for max_model_len={config.max_model_len}")
        self.allocator = BlockAllocator(target.kv_cache.num_blocks)
        is_cached, looks_ahead = config.enable_prefix_caching, speculative is not None and speculative.reads_target
        self.prefix_cache = PrefixCache(self.allocator, config.block_size, looks_ahead) if is_cached else None
        self.scheduler = scheduler(
            self.allocator,
            block_size=kv_layout.tokens_per_block,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            speculative_config=speculative,
            prefix_cache=self.prefix_cache,
        )
        self.speculative_step = SpeculativeStep(
            target,
            drafter,
            speculative.verification if speculative else "coupled",
            vocabulary.size,
            EngineMetrics(),
            max_num_batched_tokens=config.max_num_batched_tokens,
            planner=planner,
            limit=lambda verified: self.kv_layout.limit(verified),
            reserve_rounds=self.scheduler.reserve_rounds if config.rounds_per_step > 1 else None,
            most_rounds=config.rounds_per_step,
        )
        self.recovery = Recovery(self.scheduler, self.speculative_step)
        self.requests: dict[str, Request] = {}
        self._ended: dict[str, None] = {}  # ids of requests of which sequences have ended, and no output has come yet
        self._derived = itertools.count()  # seeds
        self._counted = PartCounts()  # of the metrics so far

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
            verification=self.speculative_step.verifier.name,
        )
        bad_words = self.vocabulary.bad_words(params)
        seed = derived_seed(self.config.seed, next(self._derived)) if params.seed is None else params.seed
        sequences, is_admitted = [], params.num_speculative_tokens == 0 or admits(self.speculative_step.planner)
        for child_idx in range(params.n):
            sequence = self._new_sequence(request_id, prompt_token_ids, params, seed, child_idx, bad_words, is_admitted)
            sequence.fork_source = sequences[0] if sequences and self.kv_layout.shares_blocks else None
            sequences.append(sequence)
        self.requests[request_id] = Request(request_id, prompt, sequences)
        self._metrics.prompt_tokens += len(prompt_token_ids)
        for sequence in sequences:
            self.scheduler.add(sequence)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request now and free its blocks; its output so far, or None if no such request runs."""
        self._ended.pop(request_id, None)
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
        return len(self.scheduler) > 0 or bool(self._ended)

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Run one step; the outputs of the requests that ended in it.

        What fails for one request ends it with an error. What fails for all is tried once more, from their tokens.

        Raises:
            RuntimeError: a step has failed twice. Who runs has lost its KV and nothing else: the next step is as good
                as any other.
            IntegrityError: likewise, and the engine's own state is not what it has to be.
        """
        with self.recovery:  # all or nothing
            scheduled = self._schedule()
            if not scheduled.entries:
                return self._outputs()
            scored, verified = score_and_verify(self.speculative_step, scheduled.entries)
            self.speculative_step.commit(scored, verified)
            self._fail_who_has_no_token(scored, verified)
            self._realign()
            self.speculative_step.propose(scored, self.scheduler.reserve_drafts)
            self._finish_who_ended(scheduled)
            return self._outputs()
        return []

    def check_idle(self) -> None:
        """IntegrityError if blocks are held though no sequence is here. O(1)."""
        if (num_held := self.allocator.num_held + self.kv_layout.num_draft_held) and not self.has_unfinished_requests:
            raise IntegrityError(f"{num_held} blocks are held, and no sequence is here to hold them")

    def check_integrity(self) -> None:
        """Free + held == total, and every block held is held by a sequence of this engine."""
        self.scheduler.check_integrity()
        self.kv_layout.check_integrity()
        self.kv_layout.check_draft_blocks([sequence.page_table for sequence in self.scheduler])
        if self.prefix_cache is not None:
            self.prefix_cache.check_integrity()
        for runner in self._runners:
            runner.kv_cache.check_integrity()

    @property
    def metrics(self) -> EngineMetrics:
        """Totals since the engine started, or since `reset_metrics`, as of now."""
        self._count_parts()
        return self._metrics

    def reset_metrics(self) -> None:
        """Count from zero again."""
        self._count_parts()
        self.speculative_step.metrics = EngineMetrics()

    @property
    def _metrics(self) -> EngineMetrics:
        """The totals without what the engine's parts have counted since somebody last asked."""
        return self.speculative_step.metrics

    def _new_sequence(
        self,
        request_id: str,
        prompt_token_ids: SequenceOf[int],
        params: SamplingParams,
        seed: int,
        child_idx: int,
        bad_words: SequenceOf[SequenceOf[int]],
        is_admitted: bool,
    ) -> Sequence:
        own = params.num_speculative_tokens
        max_draft_tokens = self.max_draft_tokens if own is None else own
        table = self.kv_layout.new_table(self.allocator, self.num_pools if max_draft_tokens and is_admitted else 1)
        child_seed = (seed + child_idx) % 2**64
        sequence = Sequence(request_id, list(prompt_token_ids), params, child_seed, table, max_draft_tokens, child_idx)
        sequence.sampling_request = SamplingRequest.of(sequence, self.vocabulary.stop_ids(params), bad_words)
        room = self.config.max_model_len - len(prompt_token_ids)
        sequence.stop_checker = self.vocabulary.stop_checker(params, sequence.prompt_token_ids, room)
        if not is_admitted:
            give_up(sequence, keeps_lookups(self.speculative_step.planner))
        return sequence

    def _schedule(self, may_be_empty: bool = False) -> ScheduledStep:
        """The next step, with the KV that it reads in its place. RuntimeError if nobody can run, and somebody waits."""
        with self._metrics.stage("schedule"):
            scheduled = self.scheduler.schedule()
            for sequence in scheduled.preempted:
                self.speculative_step.forget(sequence)
            if not (scheduled.entries or may_be_empty) and len(self.scheduler):
                raise RuntimeError(f"no sequence can run, and {len(self.scheduler)} wait: {list(self.scheduler)}")
            for runner in self._runners[: self.kv_layout.num_shared_pools] if scheduled.forks else ():
                self._metrics.fork_copied_bytes += runner.kv_cache.copy_blocks(scheduled.forks)
        if scheduled.entries:
            start = time.perf_counter()
            self.kv_layout.place(scheduled.entries)
            self._metrics.rollback_seconds += time.perf_counter() - start
        self._metrics.record_blocks(self.allocator.num_held, self.kv_layout.num_draft_held)
        return scheduled

    def _fail_who_has_no_token(self, scored: ScoredStep, verified: VerifyOutput) -> None:
        if not any(verified.failed):
            return
        for entry, failed in zip(scored.sampling_entries, verified.failed, strict=True):
            sequence = entry.sequence
            if failed and sequence.finish_reason is None:
                sequence.error = (
                    f"request {sequence.request_id!r}: the logits of output token "
                    f"{len(sequence.output_token_ids)} hold NaN or allow no token"
                )

    def _realign(self) -> None:
        """Bring the KV of those who go on into the layout's order."""
        start = time.perf_counter()
        self.kv_layout.realign([sequence for sequence in self.scheduler.running if not sequence.has_ended])
        self._metrics.rollback_seconds += time.perf_counter() - start

    def _finish_who_ended(self, scheduled: ScheduledStep) -> None:
        """Publish what may be shared, and free who has ended."""
        with self._metrics.stage("commit"):
            for entry in scheduled.entries:
                sequence = entry.sequence
                # Not before the sequence samples: its logits are the first to show a NaN in any of its KV.
                if self.prefix_cache is not None and entry.samples and sequence.error is None:
                    self._publish(sequence)
                if sequence.has_ended:
                    self._ended[sequence.request_id] = None  # first: a step that fails from here on comes back to it
                    self._finish(sequence, sequence.finish_reason or "error")

    def _outputs(self) -> list[RequestOutput]:
        """The outputs of the requests that have ended, which are the engine's no more."""
        if not self._ended:
            return []
        with self._metrics.stage("commit"):
            ended = map(self.requests.get, self._ended)
            finished = [request for request in ended if request is not None and request.is_finished]
            outputs = [request.output(self.vocabulary.tokenizer) for request in finished]
            for request in finished:
                del self.requests[request.request_id]
            self._ended.clear()
            return outputs

    def _publish(self, sequence: Sequence) -> None:
        """Offer the sequence's full blocks to the prefix cache."""
        try:
            self.prefix_cache.publish(sequence.page_table, sequence.token_ids)
        except IntegrityError:
            raise
        except Exception:  # it is computed again by whoever could have found it
            logger.warning("KV of request %r is not published:", sequence.request_id, exc_info=True)

    def _finish(self, sequence: Sequence, reason: str) -> None:
        sequence.finish_reason = reason
        self.speculative_step.forget(sequence)
        self.scheduler.finish(sequence)

    def _count_parts(self) -> None:
        """Add to the metrics what the engine's parts have counted since the last time: theirs go on for life."""
        counted = PartCounts.of(self.scheduler, self.kv_layout.copied, self._runners)
        self._metrics.add_parts(self._counted, counted)
        self._counted = counted
