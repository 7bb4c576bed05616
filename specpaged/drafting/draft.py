"""The draft of one sequence, on its way from proposal to verification. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Draft:
    """Draft tokens that wait to be verified.

    `logprobs` are the drafter's own log-probabilities of its tokens, None where it has none: of prompt lookup,
    `num_matched` is the length of what was found. `probs` are the distributions that the tokens were drawn from, which
    rejection sampling asks for alone. Of a trial, tokens are any, as it is a pass with so many rows that is tried: no
    metrics count it as a draft.
    """

    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] | None = None
    probs: Tensor | None = None  # [K, V] float32, processed
    num_matched: int = 0
    is_trial: bool = False

    def __len__(self) -> int:
        return len(self.token_ids)

    def cut(self, num_tokens: int) -> Draft:
        """The draft of the first num_tokens tokens: the same object, where there are no more."""
        if num_tokens >= len(self.token_ids):
            return self
        if num_tokens <= 0:
            return NO_DRAFT
        return Draft(
            self.token_ids[:num_tokens],
            None if self.logprobs is None else self.logprobs[:num_tokens],
            None if self.probs is None else self.probs[:num_tokens],
            self.num_matched,
            self.is_trial,
        )


NO_DRAFT = Draft()
