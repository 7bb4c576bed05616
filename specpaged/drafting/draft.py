"""The draft of one sequence, on its way from proposal to verification. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specpaged.speculation.acceptance import logits_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_LONGEST_MATCH = 6  # of prompt lookup: longer ones say no more


@dataclass(frozen=True, slots=True)
class Draft:
    """Draft tokens that wait to be verified.

    `logprobs` are the drafter's own log-probabilities of its tokens, None where it has none: of prompt lookup,
    `num_matched` is the length of what was found. `probs` are the distributions that the tokens were drawn from, which
    rejection sampling asks for alone. Of a trial, tokens are any, as it is a pass with so many rows that is tried: no
    metrics count it as a draft.

    Where several drafters are together, `drafter` says whose it is: 0 the model's, or the only drafter's; 1, 2, ... of
    the lookups beside it, in their order. `found` is all that lookups have found, whether or not it was taken: as much
    of it as the sequence goes on with has an outcome.
    """

    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] | None = None
    probs: Tensor | None = None  # [K, V] float32, processed
    num_matched: int = 0
    is_trial: bool = False
    drafter: int = 0
    found: Sequence[Draft] = ()

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
            self.drafter,
            self.found,
        )

    def on(self, device: torch.device) -> Draft:
        """The draft with its probabilities on a device, if it has any."""
        return self if self.probs is None else replace(self, probs=self.probs.to(device))


NO_DRAFT = Draft()


def evidence_of(draft: Draft) -> list[float]:
    """What a drafter knows of each of its tokens, as the controller takes it.

    That is how likely a token is to a model, in logits, and for prompt lookup the length of what matched.
    """
    if draft.logprobs is not None:
        return logits_of(draft.logprobs)
    return [min(draft.num_matched, _LONGEST_MATCH) - _LONGEST_MATCH / 2] * len(draft)


class Evidence(Sequence[float]):
    """What `evidence_of` a draft comes to, when somebody reads it: outcomes are learned from now and then alone."""

    __slots__ = ("_draft", "_values")

    def __init__(self, draft: Draft):
        self._draft = draft
        self._values: list[float] | None = None

    def __len__(self) -> int:
        return len(self._draft)

    def __getitem__(self, j: int) -> float:
        if self._values is None:
            self._values = evidence_of(self._draft)
        return self._values[j]
