"""A draft model with a paged KV cache of its own, under the same block ids as the target's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specpaged.drafting.base import DraftOutput, DraftRow
from specpaged.drafting.draft_steps import DraftSteps
from specpaged.modeling.model_runner import ModelRunner
from specpaged.modeling.ragged_batch import RaggedBatch, RaggedRow, pack
from specpaged.sampling.batch import SamplingBatch


class DraftModelDrafter:
    """Proposes by decoding the draft model: one ragged pass over what it has not seen, then one token each.

    One sequence with k = 3 whose draft KV lacks the last two known tokens x y:

        pass 1 runs  x y   -> d1
        pass 2 runs  d1    -> d2
        pass 3 runs  d2    -> d3        (d3 has no KV: the pool ends behind d2)
    """

    def __init__(self, runner: ModelRunner, vocab_size: int, max_num_batched_tokens: int, with_probs: bool):
        self.runner = runner
        self.vocab_size = vocab_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.with_probs = with_probs

    def propose(self, rows: Sequence[DraftRow], sampling: SamplingBatch, num_requests: int) -> DraftOutput:
        """See Drafter.propose."""
        drafting = [row for row in rows if row.num_draft_tokens > 0]
        drafts: list[list[int]] = [[] for _ in range(num_requests)]
        no_probs = [None] * num_requests
        passes = [self._packed(chunk) for chunk in self._chunks(rows)]
        if not drafting:
            for batch in passes:
                self.runner.forward(batch)
            return DraftOutput(drafts, no_probs)
        cache = self.runner.kv_cache
        steps = DraftSteps(drafting, cache.block_size, self.runner.model.device, cache.block_stride)
        if sampling.takes_argmax:
            steps.distribute(self._greedy(passes, steps), drafts)
            return DraftOutput(drafts, no_probs)
        return DraftOutput(drafts, self._sample(passes, steps, sampling, drafts))

    def _greedy(self, passes: Sequence[RaggedBatch], steps: DraftSteps) -> list[Tensor]:
        """The tokens of each step. Nothing is asked of the host between the passes."""
        if len(passes) > 1:  # rows of the first step are in several of them
            outputs = [self.runner.forward(batch, argmax_of=self.vocab_size) for batch in passes]
            first = torch.cat([output.argmax.token_ids for output in outputs])
            if len(steps) == 1:
                return [first]
            kept = steps.kept[1]
            batches = [steps.batch(1, first if kept is None else first.index_select(0, kept))]
            found, next_step = [first], 2
        else:
            batches, found, next_step = [passes[0]], [], 1
        # A batch's own tokens are those of the pass before it.
        batches += [steps.batch(step, batches[0].token_ids) for step in range(next_step, len(steps))]
        kept = [None, *steps.kept[next_step:]]
        drafted = self.runner.greedy_steps(batches, kept, self.vocab_size)
        return found + [step.token_ids for step in drafted]

    def _sample(
        self,
        passes: Sequence[RaggedBatch],
        steps: DraftSteps,
        sampling: SamplingBatch,
        drafts: list[list[int]],
    ) -> list[Tensor | None]:
        """Fills `drafts`; the probabilities [k, V] of each, if these are asked for."""
        logits = torch.cat([self._logits(batch) for batch in passes])
        sampling.draw_noise(steps.request_idx)
        probs: list[list[Tensor]] = [[] for _ in drafts]
        sampled: list[Tensor] = []
        for step, request_idx in enumerate(steps.request_idx):
            if step > 0:
                kept = steps.kept[step]
                token_ids = sampled[-1] if kept is None else sampled[-1].index_select(0, kept)
                logits = self._logits(steps.batch(step, token_ids))
            seen = [step] * len(request_idx)
            if sampling.needs_processing and step > 0:  # which looks at the drafts so far
                steps.distribute(sampled[-1:], drafts, step - 1)
            processed = sampling.process(logits, request_idx, seen, drafts)
            sampled.append(sampling.sample(processed, request_idx, seen)[0])
            if self.with_probs:
                for i, row_probs in zip(request_idx, sampling.probs(processed).unbind(), strict=True):
                    probs[i].append(row_probs)
        if sampling.needs_processing:
            steps.distribute(sampled[-1:], drafts, len(steps) - 1)
        else:
            steps.distribute(sampled, drafts)
        return [torch.stack(p) if p else None for p in probs]

    def _logits(self, batch: RaggedBatch) -> Tensor:
        """[M, V]"""
        return self.runner.forward(batch).logits[:, : self.vocab_size]

    def _packed(self, rows: Sequence[RaggedRow]) -> RaggedBatch:
        cache = self.runner.kv_cache
        return pack(rows, cache.block_size, self.runner.model.device, cache.block_stride)

    def _chunks(self, rows: Sequence[DraftRow]) -> list[list[RaggedRow]]:
        """What the drafter has not seen of the rows, in as many passes as the token budget asks for."""
        chunks: list[list[RaggedRow]] = []
        budget = 0
        for row in rows:
            start, num_tokens = 0, len(row.token_ids)
            while start < num_tokens:
                if budget == 0:
                    chunks.append([])
                    budget = self.max_num_batched_tokens
                end = min(num_tokens, start + budget)
                num_logits = int(end == num_tokens and row.num_draft_tokens > 0)
                chunks[-1].append(RaggedRow(row.token_ids[start:end], row.context_len + start, row.blocks, num_logits))
                budget -= end - start
                start = end
        return chunks
