"""What a forward pass gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Argmax(NamedTuple):
    """The most likely token of each row of logits, where nothing else is asked of them."""

    token_ids: Tensor  # [M] int64; of equals the lowest, and any id where not ok
    ok: Tensor  # [M] bool: False where the row's maximum is NaN or -inf

    @classmethod
    def of(cls, logits: Tensor) -> Argmax:
        """The argmax of logits [M, V]."""
        values, token_ids = logits.max(dim=-1)
        return cls(token_ids, values > float("-inf"))


class DraftedTokens(NamedTuple):
    """What one pass of a proposal drafts."""

    token_ids: Tensor  # [M] int64
    logprobs: Tensor  # [M] float32: the drafter's own, of these tokens

    @classmethod
    def of(cls, logits: Tensor, token_ids: Tensor) -> DraftedTokens:
        """The tokens with what the logits [M, V] that they were chosen by say of them."""
        chosen = logits.gather(1, token_ids.unsqueeze(-1)).squeeze(-1)
        return cls(token_ids, chosen - logits.logsumexp(dim=-1))


@dataclass(frozen=True, slots=True)
class HiddenStatesRequest:
    """Which hidden states a drafter reads of the target."""

    last: bool = False
    layer_inputs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Hidden states of R rows."""

    last: Tensor | None
    layer_inputs: tuple[Tensor, ...]

    def split(self, counts: Sequence[int]) -> list[HiddenStates]:
        """Of counts[0] rows, of the next counts[1] rows, ..., which are R together."""
        last = self.last.split(list(counts)) if self.last is not None else [None] * len(counts)
        inputs = (
            zip(*(x.split(list(counts)) for x in self.layer_inputs), strict=True)
            if self.layer_inputs
            else [()] * len(counts)
        )
        return [HiddenStates(*parts) for parts in zip(last, inputs, strict=True)]

    def first(self, num_rows: int) -> HiddenStates:
        """Of the first rows."""
        return HiddenStates(
            None if self.last is None else self.last[:num_rows], tuple(x[:num_rows] for x in self.layer_inputs)
        )


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """See."""

    logits: Tensor | None
    argmax: Argmax | None
    hidden_states: HiddenStates | None
