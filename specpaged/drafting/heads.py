"""Heads that read the target, with paged KV of their own under the same block ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from specpaged.drafting.base import DraftRow, ModelDrafter
from specpaged.drafting.draft import NO_DRAFT, Draft
from specpaged.drafting.draft_steps import DraftSteps
from specpaged.modeling.forward_output import DraftedTokens, Features, ForwardOutput, HiddenStatesRequest
from specpaged.modeling.heads.cpp_heads import num_draftable
from specpaged.modeling.model_runner import ModelRunner
from specpaged.modeling.ragged_batch import RaggedBatch, RaggedRow, pack
from specpaged.sampling.batch import SamplingBatch
from specpaged.speculation.stop_rule import StopRule

_OWN = HiddenStatesRequest(last=True)  # what a pass hands to the next one


class HeadsDrafter(ModelDrafter):
    """Proposes by heads: one ragged pass over the tokens behind what the target has just run, then one token each.

    One sequence with k = 3 of which the target has just run x y, and the token z is known behind them:

        pass 1 runs  (hidden state of x, y)   (hidden state of y, z) -> d1, g1
        pass 2 runs  (g1, d1) -> d2, g2                                (its KV is overwritten by the next pass 1)
        pass 3 runs  (g2, d2) -> d3

    Clover's further passes read no KV.
    """

    looks_back = False  # what it would have drafted from hidden states that are gone, nobody knows

    def __init__(self, runner: ModelRunner, vocab_size: int, with_probs: bool):
        self.runner = runner
        self.with_probs = with_probs
        decoder = runner.model.decoder
        self.hidden_states = decoder.config.hidden_states
        self._recurs = getattr(decoder, "recur", None) is not None
        # Of the heads' own vocabulary, those that may be sampled; and which tokens of the target these are.
        self._target_ids: Tensor | None = decoder.target_ids
        self._vocab_size, self._num_ids = vocab_size, num_draftable(decoder, vocab_size)

    @override
    def propose(
        self, rows: Sequence[DraftRow], sampling: SamplingBatch, stop_rule: StopRule | None = None
    ) -> list[Draft]:
        drafts = [NO_DRAFT] * len(sampling.requests)
        rows = [row for row in rows if len(row.token_ids) > 1]
        drafting = [row for row in rows if row.num_draft_tokens > 0]
        rows = [*drafting, *(row for row in rows if row.num_draft_tokens == 0)]
        if not rows:
            return drafts
        ragged, features = self._first_pass(rows)
        if sampling.takes_argmax and self.runner.runs_greedy:
            self._in_one_call(ragged, features, drafting, stop_rule, drafts)
            return drafts
        cache = self.runner.kv_cache
        batch = pack(ragged, cache.block_size, self.runner.model.device, cache.block_stride)
        found = self._forward(batch, Features(features))
        if not drafting:
            return drafts
        behind = [replace(row, token_ids=row.token_ids[1:]) for row in drafting]  # each in the place of the one before
        steps = DraftSteps(behind, cache.block_size, self.runner.model.device, cache.block_stride)
        if sampling.takes_argmax:
            self._greedy(found, steps, drafts)
        else:
            self._sample(found, steps, sampling, drafts)
        return drafts

    @staticmethod
    def _first_pass(rows: Sequence[DraftRow]) -> tuple[list[RaggedRow], Tensor]:
        """Over what the target has just run, and their features [N, F]: with a token to be found behind each row that
        drafts.
        """
        ragged, features = [], []
        for row in rows:
            token_ids, wanted = row.token_ids[1:], int(row.num_draft_tokens > 0)
            ragged.append(RaggedRow(token_ids, row.context_len, row.blocks, wanted, wanted))
            start = row.context_len - row.hidden_position
            features.append(row.hidden_states.side_by_side()[start : start + len(token_ids)])
        return ragged, torch.cat(features)

    def _in_one_call(
        self,
        ragged: Sequence[RaggedRow],
        features: Tensor,
        drafting: Sequence[DraftRow],
        stop_rule: StopRule | None,
        drafts: list[Draft],
    ) -> None:
        """Put in the drafts of those who draft, the first rows."""
        further = [row.num_draft_tokens - 1 for row in drafting] + [0] * (len(ragged) - len(drafting))
        # The rule's rows are those that were planned to draft: some may have had no room.
        rule = stop_rule if drafting and stop_rule is not None and len(stop_rule.leads) == len(drafting) else None
        found = self.runner.greedy(
            ragged, self._num_ids, further, wants_logprobs=True, stop_rule=rule, features=features
        )
        of_steps = [zip(step.token_ids, step.logprobs, strict=True) for step in found]
        for row in drafting:
            pairs = [next(step) for step in of_steps[: row.num_draft_tokens]]
            drafts[row.request_idx] = Draft([token_id for token_id, _ in pairs], [logprob for _, logprob in pairs])

    def _forward(self, batch: RaggedBatch, features: Features) -> ForwardOutput:
        return self.runner.forward(batch, hidden=_OWN, features=features)

    def _next(self, step: int, steps: DraftSteps, found: ForwardOutput, token_ids: Tensor) -> ForwardOutput:
        """What the pass of a step finds, of the tokens [M] int64 that the one before has found."""
        hidden, source_idx = found.hidden_states.last, steps.source_idx[step]
        if source_idx is not None:
            hidden, token_ids = hidden.index_select(0, source_idx), token_ids.index_select(0, source_idx)
        if self._recurs:
            return self.runner.recur(hidden, token_ids)
        batch = steps.batch(step, token_ids)
        batch = replace(batch, hidden_idx=batch.logits_idx, num_hidden=batch.num_logits)
        return self._forward(batch, Features(hidden, are_own=True))

    def _greedy(self, found: ForwardOutput, steps: DraftSteps, drafts: list[Draft]) -> None:
        """Put in the drafts of the most likely tokens. Nothing is asked of the host between the passes."""
        drafted: list[DraftedTokens] = []
        for step in range(len(steps)):
            if step > 0:
                found = self._next(step, steps, found, drafted[-1].token_ids)
            token_ids, logprobs = DraftedTokens.of(found.logits[:, : self._num_ids])
            drafted.append(DraftedTokens(self._of_target(token_ids), logprobs))
        steps.drafts(drafted, drafts)

    def _sample(self, found: ForwardOutput, steps: DraftSteps, sampling: SamplingBatch, drafts: list[Draft]) -> None:
        """Put in drafts as requests sample them."""

        def logits_of(step: int, last: Tensor) -> Tensor:
            nonlocal found
            found = self._next(step, steps, found, last)
            return self._over_target(found.logits)

        steps.sample(self._over_target(found.logits), logits_of, sampling, drafts, self.with_probs)

    def _of_target(self, token_ids: Tensor) -> Tensor:
        """[M] int64 of the heads' vocabulary -> of the target's."""
        return token_ids if self._target_ids is None else self._target_ids.index_select(0, token_ids)

    def _over_target(self, logits: Tensor) -> Tensor:
        """[M, the heads' vocabulary] -> [M, V] of tokens that may be sampled: -inf of those that are never drafted."""
        logits = logits[:, : self._num_ids]
        if self._target_ids is None and self._num_ids == self._vocab_size:
            return logits
        target_ids = slice(self._num_ids) if self._target_ids is None else self._target_ids[: self._num_ids]
        over_target = logits.new_full((len(logits), self._vocab_size), float("-inf"))
        over_target[:, target_ids] = logits
        return over_target
