"""A draft model with a paged KV cache of its own, under the same block ids as the target's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specpaged.batch import RaggedRow, pack
from specpaged.drafting.base import DraftOutput, DraftRow
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
        drafts: list[list[int]] = [[] for _ in range(num_requests)]
        probs: list[list[Tensor]] = [[] for _ in range(num_requests)]
        pending = [RaggedRow(row.token_ids, row.context_len, row.blocks, int(row.num_draft_tokens > 0)) for row in rows]
        logits = self._catch_up(pending)
        active = [row for row in rows if row.num_draft_tokens > 0]
        step = 0
        while active:
            request_idx = [row.request_idx for row in active]
            seen = [step] * len(active)
            processed = sampling.process(logits, request_idx, seen, drafts)
            token_ids = sampling.sample(processed, request_idx, seen)[0].tolist()
            if self.with_probs:
                for i, row_probs in zip(request_idx, sampling.probs(processed).unbind(), strict=True):
                    probs[i].append(row_probs)
            for i, token_id in zip(request_idx, token_ids, strict=True):
                drafts[i].append(token_id)
            step += 1
            survivors = [row for row in active if row.num_draft_tokens > step]
            if survivors:
                # d_step sits behind the known tokens and the step - 1 drafts before it.
                next_rows = [
                    RaggedRow(
                        (drafts[row.request_idx][-1],),
                        row.context_len + len(row.token_ids) + step - 1,
                        row.blocks,
                        1,
                    )
                    for row in survivors
                ]
                logits = self._forward(next_rows)
            active = survivors
        return DraftOutput(drafts, [torch.stack(p) if p else None for p in probs])

    def _forward(self, rows: Sequence[RaggedRow]) -> Tensor:
        batch = pack(rows, self.runner.kv_cache.block_size, self.runner.model.device)
        return self.runner.forward(batch)[:, : self.vocab_size]

    def _catch_up(self, rows: Sequence[RaggedRow]) -> Tensor:
        """Run all rows, in as many passes as the token budget asks for; logits [asked for, V] in row order."""
        logits: list[Tensor] = []
        chunk: list[RaggedRow] = []
        budget = self.max_num_batched_tokens
        for row in rows:
            start = 0
            while start < len(row.token_ids):
                if budget == 0:
                    logits.append(self._forward(chunk))
                    chunk, budget = [], self.max_num_batched_tokens
                end = min(len(row.token_ids), start + budget)
                num_logits = row.num_logits if end == len(row.token_ids) else 0
                chunk.append(RaggedRow(row.token_ids[start:end], row.context_len + start, row.blocks, num_logits))
                budget -= end - start
                start = end
        if chunk:
            logits.append(self._forward(chunk))
        if len(logits) == 1:
            return logits[0]
        return torch.cat(logits) if logits else torch.empty(0, self.vocab_size)
