"""Continuous batching: every step takes whoever can run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from specpaged.drafting.draft import NO_DRAFT
from specpaged.engine.scheduler import ScheduledSequence, ScheduledStep
from specpaged.engine.sequence import Sequence, SequenceStatus
from specpaged.paging.block_allocator import BlockAllocator, OutOfBlocksError
from specpaged.paging.page_table import TARGET
from specpaged.paging.prefix_cache import PrefixCache
from specpaged.scheduling.draft_slots import DraftSlots
from specpaged.speculative_config import SpeculativeConfig


class ContinuousScheduler(DraftSlots):
    """First come, first served, with a token budget, chunked prefill and preemption by recomputation.

    A step is put together in three passes. Running sequences first: each needs KV slots for its known tokens,
    and when the pool is out of blocks all pending drafts give back theirs, then the youngest running sequence all of
    its own: it waits at the front of the queue, to be recomputed later. Then waiting ones are admitted while sequences,
    token budget and free blocks, those of pending drafts among them, allow. Last, drafts are verified as far as the
    token budget goes; of it they may keep half from a prefill, so that neither starves the other. Speculation never
    preempts anybody, nor keeps anybody waiting.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        speculative_config: SpeculativeConfig | None,
        prefix_cache: PrefixCache | None,
    ):
        super().__init__()
        self.allocator = allocator
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.speculative_config = speculative_config
        self.prefix_cache = prefix_cache
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.num_preemptions = 0
        self._preempted: list[Sequence] = []  # of the step that is being made
        self.num_grouped_rounds = 0  # see ExspecScheduler
        self.num_fallback_rounds = 0

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.waiting

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. Its whole length must fit into the pool (the engine checks that)."""
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, running or waiting, and free its pages."""
        sequence.page_table.free()
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.draft = NO_DRAFT

    def schedule(self) -> ScheduledStep:
        """Decide the next step. Blocks for every token that it will write are reserved on return."""
        self._num_new_tokens = num_new_tokens = {}
        forks: list[tuple[int, int]] = []
        self._preempted = []
        candidates = self._candidates()
        missing = list(map(self._num_missing, candidates))
        prefill_budget = self._prefill_budget(candidates, missing)

        for sequence, num_missing in zip(candidates, missing, strict=True):
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # preempted just now, for an older one
            count = 1 if num_missing == 1 else min(num_missing, prefill_budget)
            if count and self._reserve(sequence, count):
                num_new_tokens[sequence] = count
                prefill_budget -= count if num_missing > 1 else 0

        while self.waiting and self._has_room(len(num_new_tokens)) and prefill_budget > 0 and not self._preempted:
            sequence = self.waiting[0]
            if self._waits_for_fork(sequence) or not self._admit(sequence, forks):
                break
            self.waiting.popleft()
            self.running.append(sequence)
            sequence.status = SequenceStatus.RUNNING
            count = min(self._num_missing(sequence), prefill_budget)
            sequence.page_table.reserve(sequence.page_table.context_lens[TARGET] + count)
            num_new_tokens[sequence] = count
            prefill_budget -= count

        self.num_short_steps += self.is_short
        return ScheduledStep(self._with_drafts(num_new_tokens), tuple(forks), tuple(self._preempted))

    def preempt_all(self) -> list[Sequence]:
        """Take the KV of all that run, who wait then, oldest first; who they are."""
        self._preempted = []
        for sequence in list(reversed(self.running)):
            self._preempt(sequence)
        for sequence in self.waiting:
            sequence.page_table.free()  # of who was just about to be admitted
        return self._preempted

    def _prefill_budget(self, candidates: list[Sequence], missing: list[int]) -> int:
        """Tokens of the step for prompts: they leave one to everybody who decodes, and up to half of the rest to
        drafts. 0 where all decode, and nobody waits."""
        decoding = [sequence for sequence, count in zip(candidates, missing, strict=True) if count == 1]
        if not self.waiting and len(decoding) == len(missing):
            return 0
        budget = self.max_num_batched_tokens - len(decoding)
        num_draft_tokens = sum(len(sequence.draft.token_ids) for sequence in decoding)
        return max(1, budget - min(budget // 2, num_draft_tokens))

    def _candidates(self) -> list[Sequence]:
        """The running sequences that take part in the next step, if there are slots for them."""
        return list(self.running)

    def _has_room(self, num_scheduled: int) -> bool:
        """Whether the first of those that wait may join a step of so many sequences."""
        return len(self.running) < self.max_num_seqs

    @staticmethod
    def _num_missing(sequence: Sequence) -> int:
        """Known tokens without KV: one while decoding, more in prefill and after a preemption."""
        return len(sequence.token_ids) - sequence.page_table.context_lens[TARGET]

    def _reserve(self, sequence: Sequence, count: int) -> bool:
        """Slots for `count` more tokens, taken from younger sequences if need be; False: it gave up its own."""
        table = sequence.page_table
        while True:
            try:
                table.reserve(table.context_lens[TARGET] + count)
                return True
            except OutOfBlocksError:
                if self._release_drafts():
                    continue
                victim = self.running[-1]
                self._preempt(victim)
                if victim is sequence:
                    return False

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.page_table.free()
        sequence.draft = NO_DRAFT
        self._preempted.append(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.metrics.preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(sequence)

    def _waits_for_fork(self, sequence: Sequence) -> bool:
        """Whether a sibling is still computing the prompt that this sequence will share."""
        source = sequence.fork_source
        return (
            source is not None
            and source.status is SequenceStatus.RUNNING
            and not sequence.output_token_ids
            and source.page_table.context_lens[TARGET] < sequence.num_prompt_tokens - 1
        )

    def _admit(self, sequence: Sequence, forks: list[tuple[int, int]]) -> bool:
        """Give a waiting sequence the KV that can be shared, if blocks for its known tokens are free."""
        table = sequence.page_table
        source = sequence.fork_source
        # The last known token always runs: its logits are what the sequence is admitted for.
        shareable = sequence.num_tokens - 1
        if source is not None and source.status is SequenceStatus.RUNNING:
            num_shared = min(sequence.num_prompt_tokens - 1, source.page_table.context_lens[TARGET])
            if self._make_room(sequence.num_tokens, num_shared // self.block_size):
                child, copies = source.page_table.fork(num_shared)
                sequence.page_table = child
                forks.extend(copies)
                return True
            return False
        if self.prefix_cache is None or sequence.params.prompt_logprobs is not None:
            # A cached prompt token has no logits, so whoever asks for them computes the prompt.
            return self._make_room(sequence.num_tokens, 0)
        blocks, context_lens = self.prefix_cache.match(sequence.token_ids, shareable, len(table.context_lens))
        table.adopt(blocks, context_lens)
        if not self._make_room(sequence.num_tokens, len(blocks)):
            table.free()
            return False
        if blocks and not sequence.metrics.preemptions:  # afterwards it finds its own blocks, output among them
            sequence.metrics.cached_prompt_tokens = len(blocks) * self.block_size
        return True

    def _make_room(self, num_tokens: int, num_shared_blocks: int) -> bool:
        """Whether blocks for so many tokens are free, or were held for drafts, which then give them back."""
        num_needed = -(-num_tokens // self.block_size) - num_shared_blocks
        if num_needed > self.allocator.num_free + sum(map(self._num_draft_blocks, self.running)):
            return False
        youngest_first = reversed(self.running)
        while num_needed > self.allocator.num_free:
            self._release_draft(next(sequence for sequence in youngest_first if self._num_draft_blocks(sequence)))
        return True

    def _with_drafts(self, num_new_tokens: dict[Sequence, int]) -> tuple[ScheduledSequence, ...]:
        """The step's sequences with as much of their drafts as the token budget leaves."""
        budget = self.max_num_batched_tokens - sum(num_new_tokens.values())
        entries = []
        for sequence, count in num_new_tokens.items():
            context_len = sequence.page_table.context_lens[TARGET]
            draft = sequence.draft.cut(budget)
            budget -= len(draft.token_ids)
            samples = context_len + count == len(sequence.token_ids)
            entries.append(ScheduledSequence(sequence, context_len, count, samples, draft))
        return tuple(entries)

    def check_integrity(self) -> None:
        """Every block held is held by the sequences here, as often as it is shared."""
        for sequence in self:
            sequence.page_table.check_integrity()
        self.allocator.check_integrity([sequence.page_table.blocks for sequence in self])
