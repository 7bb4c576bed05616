"""A draft model with a paged KV cache of its own, under the same block ids as the target's."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from specpaged.drafting.base import DraftRow
from specpaged.drafting.draft import Draft
from specpaged.drafting.draft_steps import DraftSteps
from specpaged.modeling.forward_output import DraftedTokens
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

    hidden_states = None  # it reads tokens alone

    def __init__(self, runner: ModelRunner, vocab_size: int, max_num_batched_tokens: int, with_probs: bool):
        self.runner = runner
        self.vocab_size = vocab_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.with_probs = with_probs

    @override
    def propose(self, rows: Sequence[DraftRow], sampling: SamplingBatch) -> list[Draft]:
        drafting = [row for row in rows if row.num_draft_tokens > 0]
        passes = [self._packed(chunk) for chunk in self._chunks(rows)]
        if not drafting:
            for batch in passes:
                self.runner.forward(batch)
            return []
        cache = self.runner.kv_cache
        steps = DraftSteps(drafting, cache.block_size, self.runner.model.device, cache.block_stride)
        if sampling.takes_argmax:
            return steps.drafts(self._greedy(passes, steps))
        return self._sample(passes, steps, sampling)

    @override
    def forget(self, sequence: Hashable) -> None:
        pass  # its KV is the page table's

    def _greedy(self, passes: Sequence[RaggedBatch], steps: DraftSteps) -> list[DraftedTokens]:
        """The tokens of each step. Nothing is asked of the host between the passes."""
        if len(passes) > 1:  # rows of the first step are in several of them
            first_of_passes = [self.runner.greedy_steps([batch], [None], self.vocab_size)[0] for batch in passes]
            first = DraftedTokens(*map(torch.cat, zip(*first_of_passes, strict=True)))
            if len(steps) == 1:
                return [first]
            source_idx = steps.source_idx[1]
            first_ids = first.token_ids
            batches = [steps.batch(1, first_ids if source_idx is None else first_ids.index_select(0, source_idx))]
            drafted, next_step = [first], 2
        else:
            batches, drafted, next_step = [passes[0]], [], 1
        # A batch's own tokens are those of the pass before it.
        batches += [steps.batch(step, batches[0].token_ids) for step in range(next_step, len(steps))]
        source_idx = [None, *steps.source_idx[next_step:]]
        return drafted + self.runner.greedy_steps(batches, source_idx, self.vocab_size)

    def _sample(self, passes: Sequence[RaggedBatch], steps: DraftSteps, sampling: SamplingBatch) -> list[Draft]:
        logits = torch.cat([self._logits(batch) for batch in passes])
        sampling.draw_noise(steps.request_idx)
        token_ids: list[list[int]] = [[] for _ in sampling.requests]  # drafts so far, where processing looks at them
        probs: list[list[Tensor]] = [[] for _ in sampling.requests]
        drafted: list[DraftedTokens] = []
        for step, request_idx in enumerate(steps.request_idx):
            if step > 0:
                last, source_idx = drafted[-1].token_ids, steps.source_idx[step]
                logits = self._logits(
                    steps.batch(step, last if source_idx is None else last.index_select(0, source_idx))
                )
                if sampling.needs_processing:
                    for i, token_id in zip(steps.request_idx[step - 1], last.tolist(), strict=True):
                        token_ids[i].append(token_id)
            seen = [step] * len(request_idx)
            processed = sampling.process(logits, request_idx, seen, token_ids)
            drafted.append(DraftedTokens.of(processed, sampling.sample(processed, request_idx, seen)[0]))
            if self.with_probs:
                for i, row_probs in zip(request_idx, sampling.probs(processed).unbind(), strict=True):
                    probs[i].append(row_probs)
        drafts = steps.drafts(drafted)
        if not self.with_probs:
            return drafts
        return [replace(draft, probs=torch.stack(of_draft)) for draft, of_draft in zip(drafts, probs, strict=True)]

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
