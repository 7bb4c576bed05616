"""A draft model with a paged KV cache of its own, under the same block ids as the target's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor
from typing_extensions import override

from specpaged.drafting.base import DraftRow, ModelDrafter
from specpaged.drafting.draft import NO_DRAFT, Draft
from specpaged.drafting.draft_steps import DraftSteps
from specpaged.modeling.forward_output import DraftedTokens
from specpaged.modeling.model_runner import ModelRunner
from specpaged.modeling.ragged_batch import RaggedBatch, RaggedRow, pack, upload
from specpaged.sampling.batch import SamplingBatch
from specpaged.speculation.stop_rule import StopRule

# Of a pass: with more of them the pass of a small model is hardly quicker, and its buffers are what a draft holds of
# memory beside its weights and KV.
MOST_ROWS = 512


class DraftModelDrafter(ModelDrafter):
    """Proposes by decoding the draft model: one ragged pass over what it has not seen, then one token each.

    One sequence with k = 3 whose draft KV lacks the last two known tokens x y:

        pass 1 runs  x y   -> d1
        pass 2 runs  d1    -> d2
        pass 3 runs  d2    -> d3        (d3 has no KV: the pool ends behind d2)
    """

    hidden_states = None  # it reads tokens alone
    looks_back = True

    def __init__(self, runner: ModelRunner, vocab_size: int, max_num_batched_tokens: int, with_probs: bool):
        self.runner = runner
        self.vocab_size = vocab_size
        self.max_num_batched_tokens = min(max_num_batched_tokens, MOST_ROWS)
        self.with_probs = with_probs

    @override
    def propose(
        self, rows: Sequence[DraftRow], sampling: SamplingBatch, stop_rule: StopRule | None = None
    ) -> list[Draft]:
        drafting = [row for row in rows if row.num_draft_tokens > 0]
        looking = [row for row in rows if row.num_looked_back]
        others = [row for row in rows if row.num_draft_tokens == 0 and not row.num_looked_back]
        drafts = [NO_DRAFT] * len(sampling.requests)
        if not any(row.token_ids for row in rows):
            return drafts
        if sampling.takes_argmax and self.runner.runs_greedy:
            looked_back = self._in_one_call(drafting, [*looking, *others], stop_rule, drafts)
            return self._looked_back(drafts, looking, looked_back)
        passes = [self._packed(chunk) for chunk in self._chunks([*drafting, *looking, *others])]
        if not drafting and not looking:
            for batch in passes:
                self.runner.forward(batch)
            return drafts
        if not drafting:
            if sampling.takes_argmax:
                looked = torch.cat([self._argmax(batch) for batch in passes])
            else:
                looked = self._sampled_back(torch.cat([self._logits(batch) for batch in passes]), looking, sampling)
            return self._looked_back(drafts, looking, looked.tolist())
        cache = self.runner.kv_cache
        steps = DraftSteps(drafting, cache.block_size, self.runner.model.device, cache.block_stride)
        if sampling.takes_argmax:
            drafted = self._greedy(passes, steps)
            looked = drafted[0].token_ids[len(drafting) :]
            if looking:
                drafted[0] = DraftedTokens(*(values[: len(drafting)] for values in drafted[0]))
            steps.drafts(drafted, drafts)
        else:
            logits = torch.cat([self._logits(batch) for batch in passes])
            looked = self._sampled_back(logits[len(drafting) :], looking, sampling)
            self._sample(logits[: len(drafting)], steps, sampling, drafts)
        return self._looked_back(drafts, looking, looked.tolist())

    def _in_one_call(
        self,
        drafting: Sequence[DraftRow],
        others: Sequence[DraftRow],
        stop_rule: StopRule | None,
        drafts: list[Draft],
    ) -> list[int]:
        """Put in the drafts of those who draft; what the others' rows came to.

        Where that takes several passes, all but the newest tokens of those who draft are run first.
        """
        chunks, count = self._chunks([*drafting, *others]), len(drafting)
        if len(chunks) > 1 and drafting:
            before = [replace(row, token_ids=row.token_ids[:-1], num_draft_tokens=0) for row in drafting]
            newest = [
                RaggedRow(row.token_ids[-1:], row.context_len + len(row.token_ids) - 1, row.blocks, 1)
                for row in drafting
            ]
            chunks = [*self._chunks([*before, *others]), newest]
        found_before = [self.runner.greedy(chunk, self.vocab_size)[0].token_ids for chunk in chunks[:-1]]
        further = [*[row.num_draft_tokens - 1 for row in drafting], *[0] * (len(chunks[-1]) - count)]
        found = self.runner.greedy(
            chunks[-1], self.vocab_size, further, wants_logprobs=bool(drafting), stop_rule=stop_rule
        )
        of_steps = [zip(step.token_ids, step.logprobs, strict=True) for step in found]
        for row in drafting:
            pairs = [next(step) for step in of_steps[: row.num_draft_tokens]]
            drafts[row.request_idx] = Draft([token_id for token_id, _ in pairs], [logprob for _, logprob in pairs])
        return [*chain(*found_before), *found[0].token_ids[count:]]

    def _greedy(self, passes: Sequence[RaggedBatch], steps: DraftSteps) -> list[DraftedTokens]:
        """The tokens of each step. Nothing is asked of the host between the passes."""
        first_rows = len(steps.request_idx[0])
        if len(passes) > 1:  # rows of the first step are in several of them
            first_of_passes = [self.runner.greedy_steps([batch], [None], self.vocab_size)[0] for batch in passes]
            first = DraftedTokens(*map(torch.cat, zip(*first_of_passes, strict=True)))
            if len(steps) == 1:
                return [first]
            source_idx = steps.source_idx[1]
            first_ids = first.token_ids[:first_rows]
            batches = [steps.batch(1, first_ids if source_idx is None else first_ids.index_select(0, source_idx))]
            drafted, next_step = [first], 2
        else:
            batches, drafted, next_step = [passes[0]], [], 1
        # A batch's own tokens are those of the pass before it.
        batches += [steps.batch(step, batches[0].token_ids) for step in range(next_step, len(steps))]
        source_idx = [None, *steps.source_idx[next_step:]]
        if next_step == 1 < len(source_idx) and source_idx[1] is None and passes[0].logits_idx.numel() > first_rows:
            source_idx[1] = upload(torch.arange(first_rows), self.runner.model.device)  # not of those who look back
        return drafted + self.runner.greedy_steps(batches, source_idx, self.vocab_size)

    def _sample(self, logits: Tensor, steps: DraftSteps, sampling: SamplingBatch, drafts: list[Draft]) -> None:
        """Put in the drafts of a proposal whose first step has these logits [rows, V]."""

        def logits_of(step: int, last: Tensor) -> Tensor:
            source_idx = steps.source_idx[step]
            return self._logits(steps.batch(step, last if source_idx is None else last.index_select(0, source_idx)))

        steps.sample(logits, logits_of, sampling, drafts, self.with_probs)

    def _sampled_back(self, logits: Tensor, looking: Sequence[DraftRow], sampling: SamplingBatch) -> Tensor:
        """[M] int64: what would have been sampled of these rows, which meet the noise of the tokens that came there.

        Penalties see all tokens of the sequence, those behind a row, too: it is but a guess of how drafts fare.
        """
        request_idx = [row.request_idx for row in looking for _ in range(row.num_looked_back)]
        seen = [-back for row in looking for back in range(row.num_looked_back, 0, -1)]
        if not request_idx:
            return logits.new_zeros(0)
        return sampling.choose(logits, request_idx, seen, [()] * len(sampling.requests)).token_ids

    @staticmethod
    def _looked_back(drafts: list[Draft], looking: Sequence[DraftRow], looked: Sequence[int]) -> list[Draft]:
        """The drafts with what the rows that look back would have drafted behind each of their last tokens."""
        token_ids = iter(looked)
        for row in looking:
            drafts[row.request_idx] = Draft([next(token_ids) for _ in range(row.num_looked_back)])
        return drafts

    def _argmax(self, batch: RaggedBatch) -> Tensor:
        """[M] int64"""
        return self.runner.forward(batch, argmax_of=self.vocab_size).argmax.token_ids

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
                if row.num_looked_back:
                    num_logits = max(0, end - max(start, num_tokens - row.num_looked_back))
                chunks[-1].append(RaggedRow(row.token_ids[start:end], row.context_len + start, row.blocks, num_logits))
                budget -= end - start
                start = end
        return chunks
