"""Drafting without a model: what followed the newest tokens where they stood before."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence

import torch
from typing_extensions import override

from specpaged.drafting.base import DraftRow
from specpaged.drafting.draft import NO_DRAFT, Draft
from specpaged.modeling.rounds import Lookup
from specpaged.sampling.batch import SamplingBatch
from specpaged.speculation.stop_rule import StopRule
from specpaged_kernels.cpu import library, lookup


class LookupDrafter:
    """Drafts from what it keeps of each sequence: an index, to which only new tokens are added."""

    hidden_states = None
    looks_back = False
    stops = False

    def __init__(self, indexes: Indexes):
        self.in_rounds: Indexes | None = indexes

    def propose(
        self, rows: Sequence[DraftRow], sampling: SamplingBatch, stop_rule: StopRule | None = None
    ) -> list[Draft]:
        """Of a row only `sequence`, `request_idx` and `num_draft_tokens` are read."""
        drafts = [NO_DRAFT] * len(sampling.requests)
        for row in rows:
            request = sampling.requests[row.request_idx]
            known = request.prompt_token_ids, request.output_token_ids
            drafts[row.request_idx] = self.find(row.sequence, *known, row.num_draft_tokens)
        return drafts

    def find(self, sequence: Hashable, prompt: Sequence[int], output: Sequence[int], num_tokens: int) -> Draft:
        """At most so many tokens behind the sequence's known ones."""
        index = self.in_rounds.up_to_date(sequence, prompt, output)
        token_ids, evidence = index.find((), num_tokens)
        if self.in_rounds.evidence_is_length:
            return Draft(token_ids, num_matched=int(evidence[0]) if evidence else 0)
        return Draft(token_ids, evidence)

    def forget(self, sequence: Hashable) -> None:
        """See Drafter."""
        self.in_rounds.forget(sequence)


class Indexes(Lookup):
    """Of each sequence that has drafted, an index of its tokens. Several rounds in one call add to it, too."""

    def __init__(self) -> None:
        self._indexes: dict[Hashable, lookup.Lookup] = {}

    @abstractmethod
    def new_index(self) -> lookup.Lookup:
        """Of no tokens yet."""

    @override
    def address(self, sequence: Hashable, token_ids: Sequence[int]) -> int:
        return self.up_to_date(sequence, token_ids).address

    def up_to_date(self, sequence: Hashable, token_ids: Sequence[int], further: Sequence[int] = ()) -> lookup.Lookup:
        """The sequence's index, of these tokens and `further` ones, which begin with those that it had."""
        index = self._indexes.get(sequence)
        num_known = 0 if index is None else index.num_tokens
        if index is None or num_known > len(token_ids) + len(further):  # rounds whose tokens nobody took
            index = self._indexes[sequence] = self.new_index()
            num_known = 0
        if num_known < len(token_ids):
            index.append([*token_ids[num_known:], *further])
        elif num_known < len(token_ids) + len(further):
            index.append(further[num_known - len(token_ids) :])
        return index

    def forget(self, sequence: Hashable) -> None:
        """It has ended, or given up its KV."""
        self._indexes.pop(sequence, None)

    @property
    def num_sequences(self) -> int:
        """Of which an index is kept."""
        return len(self._indexes)


def why_no_indexes() -> str | None:
    """Why there can be none here; None where there can."""
    return library.why_not(torch.float32)
