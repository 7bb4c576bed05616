"""A draft model with a paged KV cache of its own, under the same block ids as the target's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specpaged.batch import RaggedBatch, RaggedRow, pack
from specpaged.drafting.base import DraftOutput, DraftRow
from specpaged.drafting.draft_steps import DraftSteps
from specpaged.modeling.model_runner import ModelRunner
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
        pending = [RaggedRow(row.token_ids, row.context_len, row.blocks, int(row.num_draft_tokens > 0)) for row in rows]
        run = self._most_likely if sampling.takes_argmax else self._logits
        scores = self._catch_up(pending, run)
        drafting = [row for row in rows if row.num_draft_tokens > 0]
        drafts: list[list[int]] = [[] for _ in range(num_requests)]
        if not drafting:
            return DraftOutput(drafts, [None] * num_requests)
        steps = DraftSteps(drafting, self.runner.kv_cache.block_size, self.runner.model.device)
        sampling.draw_noise(steps.request_idx)
        probs: list[list[Tensor]] = [[] for _ in range(num_requests)]
        sampled: list[Tensor] = []
        for step, request_idx in enumerate(steps.request_idx):
            if step > 0:
                scores = run(steps.batch(step, sampled[-1]))
            if sampling.takes_argmax:
                sampled.append(scores)
                continue
            seen = [step] * len(request_idx)
            if sampling.needs_processing and step > 0:  # which looks at the drafts so far
                steps.distribute(sampled[-1:], drafts, step - 1)
            processed = sampling.process(scores, request_idx, seen, drafts)
            sampled.append(sampling.sample(processed, request_idx, seen)[0])
            if self.with_probs:
                for i, row_probs in zip(request_idx, sampling.probs(processed).unbind(), strict=True):
                    probs[i].append(row_probs)
        if sampling.needs_processing:
            steps.distribute(sampled[-1:], drafts, len(steps) - 1)
        else:
            steps.distribute(sampled, drafts)
        return DraftOutput(drafts, [torch.stack(p) if p else None for p in probs])

    def _logits(self, batch: RaggedBatch) -> Tensor:
        """[M, V]"""
        return self.runner.forward(batch)[:, : self.vocab_size]

    def _most_likely(self, batch: RaggedBatch) -> Tensor:
        """[M] int64"""
        return self.runner.argmax(batch, self.vocab_size).token_ids

    def _catch_up(self, rows: Sequence[RaggedRow], run: Callable[[RaggedBatch], Tensor]) -> Tensor:
        """Run all rows, in as many passes as the token budget asks for; what `run` gives of them, in row order."""
        scores: list[Tensor] = []
        chunk: list[RaggedRow] = []
        budget = self.max_num_batched_tokens
        for row in rows:
            start = 0
            while start < len(row.token_ids):
                if budget == 0:
                    scores.append(run(self._packed(chunk)))
                    chunk, budget = [], self.max_num_batched_tokens
                end = min(len(row.token_ids), start + budget)
                num_logits = row.num_logits if end == len(row.token_ids) else 0
                chunk.append(RaggedRow(row.token_ids[start:end], row.context_len + start, row.blocks, num_logits))
                budget -= end - start
                start = end
        if chunk:
            scores.append(run(self._packed(chunk)))
        return scores[0] if len(scores) == 1 else torch.cat(scores)

    def _packed(self, rows: Sequence[RaggedRow]) -> RaggedBatch:
        return pack(rows, self.runner.kv_cache.block_size, self.runner.model.device)
