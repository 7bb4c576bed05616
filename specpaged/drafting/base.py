"""What every drafter takes and gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from specpaged.sampling.batch import SamplingBatch


@dataclass(frozen=True, slots=True)
class DraftRow:
    """One sequence's share of a proposal, as values.

    `token_ids` are the known tokens, in order, that the drafter has not seen (KV missing in its pool from
    `context_len` on); `blocks` covers them and `num_draft_tokens - 1` slots more. With `num_draft_tokens` = 0
    the drafter only catches up; otherwise `request_idx` is the sequence's place in the sampling batch.
    """

    token_ids: Sequence[int]
    context_len: int
    blocks: Sequence[int]
    num_draft_tokens: int
    request_idx: int


@dataclass(frozen=True, slots=True)
class DraftOutput:
    """Drafts of the sequences of a sampling batch, in its order (empty where nothing was asked for)."""

    token_ids: list[list[int]]
    probs: list[Tensor | None]  # per sequence [k_i, V] fp32, processed; only for rejection sampling

    @classmethod
    def empty(cls, num_requests: int) -> DraftOutput:
        """No drafts: the plain path."""
        return cls([[] for _ in range(num_requests)], [None] * num_requests)


class Drafter(Protocol):
    """Proposes tokens; never decides any."""

    def propose(self, rows: Sequence[DraftRow], sampling: SamplingBatch, num_requests: int) -> DraftOutput:
        """Draft for every row that asks for it, and bring the drafter's KV of all rows up to date.

        Afterwards the drafter's pool holds KV for `token_ids` of every row, then for d1 .. d(k-1).
        """
        ...
