"""What `check_drafter` puts between an engine and a drafter: it sees what goes in and out, and what changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from specpaged.drafting.base import Drafter, DraftRow
from specpaged.drafting.checked import DraftError, checked_drafts
from specpaged.drafting.draft import Draft
from specpaged.sampling.batch import SamplingBatch
from specpaged.speculation.stop_rule import StopRule

# One sequence's proposal, by request id, child, known tokens, and how many drafts were asked for.
ProposalKey = tuple[str, int, int, int]


class ContractError(AssertionError):
    """A drafter breaks a rule of its contract: `rule` is the rule's name, which docs/drafters.md explains."""

    def __init__(self, rule: str, message: str):
        super().__init__(f"{rule}: {message}")
        self.rule = rule


class DrafterWitness(Drafter):
    """Hands on what is asked, and keeps the first rule that was broken: whoever runs the engine raises it.

    An engine goes on without drafts where a proposal fails, so that nothing raised in here would come through.
    """

    def __init__(self, drafter: Drafter, vocab_size: int, gives_probs: bool):
        self.drafter = drafter
        self.vocab_size = vocab_size
        self.gives_probs = gives_probs
        self.broken: ContractError | None = None
        self.num_forgotten: Counter[Hashable] = Counter()
        self.proposals: dict[ProposalKey, list[int]] = {}
        self.num_proposals = 0

    def raise_if_broken(self) -> None:
        """ContractError, of the first rule that was broken."""
        if self.broken is not None:
            raise self.broken

    @override
    def propose(
        self, rows: Sequence[DraftRow], sampling: SamplingBatch, stop_rule: StopRule | None = None
    ) -> list[Draft]:
        before = _Handed(rows, sampling)
        of_rule = () if stop_rule is None else (stop_rule,)
        try:
            drafts = self.drafter.propose(rows, sampling, *of_rule)
        except Exception as error:
            raise self._breaks("raises", f"propose() raised {type(error).__name__}: {error}") from error
        changed = before.what_changed()
        if changed is not None:
            raise self._breaks("untouched", f"propose() changed {changed}, which it may only read")
        try:
            checked = checked_drafts(drafts, before.rows, before.num_requests, self.vocab_size, self.gives_probs)
        except DraftError as error:
            raise self._breaks(error.rule, str(error)) from error
        self.num_proposals += 1
        for row in rows:
            if row.num_draft_tokens:
                sequence = row.sequence
                key = sequence.request_id, sequence.child_idx, sequence.num_tokens, row.num_draft_tokens
                self.proposals[key] = list(checked[row.request_idx].token_ids)
        return drafts

    @override
    def forget(self, sequence: Hashable) -> None:
        self.num_forgotten[sequence] += 1
        try:
            self.drafter.forget(sequence)
        except Exception as error:
            raise self._breaks("forget", f"forget() raised {type(error).__name__}: {error}") from error

    def _breaks(self, rule: str, message: str) -> ContractError:
        error = ContractError(rule, message)
        self.broken = self.broken or error
        return error


class _Handed:
    """What a drafter is handed, and copies of all that it may read there."""

    def __init__(self, rows: Sequence[DraftRow], sampling: SamplingBatch):
        self.given_rows, self.given_requests = rows, sampling.requests
        self.rows, self.requests = list(rows), list(sampling.requests)
        self.num_requests = len(self.requests)
        self.lists = [(tokens, list(tokens)) for tokens in self._token_lists()]
        self.tensors = [(tensor, tensor.clone()) for tensor in self._tensors()]

    def what_changed(self) -> str | None:
        """What is no longer as it was; None if nothing is."""
        if not (_are_same(self.given_rows, self.rows) and _are_same(self.given_requests, self.requests)):
            return "the lists of rows or of requests"
        if any(list(tokens) != copy for tokens, copy in self.lists):
            return "token ids of a sequence"
        if any(not torch.equal(tensor, copy) for tensor, copy in self.tensors):
            return "hidden states"
        return None

    def _token_lists(self) -> list[Any]:
        of_rows = [(row.sequence.token_ids, row.sequence.output_token_ids) for row in self.rows]
        of_requests = [(request.prompt_token_ids, request.output_token_ids) for request in self.requests]
        return [tokens for pair in (*of_rows, *of_requests) for tokens in pair]

    def _tensors(self) -> list[Tensor]:
        found = []
        for row in self.rows:
            if row.hidden_states is not None:
                found += row.hidden_states.layer_inputs
                found += [] if row.hidden_states.last is None else [row.hidden_states.last]
        return found


def _are_same(given: Sequence[Any], before: Sequence[Any]) -> bool:
    return len(given) == len(before) and all(map(is_, given, before))
