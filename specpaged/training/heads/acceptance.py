"""How many drafts a target would accept, by position: of heads, and of prompt lookup on the same tokens.

Measured on greedy continuations that nothing was trained on. Each of their tokens is the target's most likely one, so a
draft is accepted where it is the token that comes. Drafting starts behind every token of a continuation that enough
others follow, and heads read their own drafts as they do when they serve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specpaged.training.heads.batches import Batch
from specpaged.training.heads.clover import Clover
from specpaged.training.heads.continuations import Continuation
from specpaged.training.heads.eagle3 import Eagle3
from specpaged.training.heads.target import FrozenTarget
from specpaged_kernels.cpu.ngram_index import ngram_ref

NUM_DRAFTS = 5
LONGEST_LOOKUP = 5


@dataclass(frozen=True)
class Acceptance:
    """Of `starts` drafts of NUM_DRAFTS tokens, how many stood up to and with each position."""

    starts: int
    accepted: tuple[int, ...]  # never grows from one position to the next

    @property
    def by_position(self) -> list[float]:
        """The share of drafts whose tokens stand up to this position and with it, as vLLM counts them."""
        return [count / max(1, self.starts) for count in self.accepted]

    @property
    def given_those_before(self) -> list[float]:
        """The same, of drafts whose tokens before this position stand, as `specpaged tune` counts them."""
        before = (self.starts, *self.accepted)
        return [a / b if b else 0.0 for a, b in zip(self.accepted, before, strict=False)]

    @property
    def mean_length(self) -> float:
        """Tokens of a round: those accepted, and one of the target's own."""
        return 1 + sum(self.accepted) / max(1, self.starts)

    def as_dict(self) -> dict[str, object]:
        """Figures for JSON."""
        return {
            "by_position": [round(share, 4) for share in self.by_position],
            "given_those_before": [round(share, 4) for share in self.given_those_before],
            "mean_acceptance_length": round(self.mean_length, 4),
            "starts": self.starts,
        }


@torch.no_grad()
def propose(heads: Eagle3 | Clover, target: FrozenTarget, batch: Batch, num_drafts: int) -> Tensor:
    """[B, T, num_drafts] int64: at row i the tokens i + 2, i + 3, ... as heads see them that have read up to i + 1."""
    drafts: list[Tensor] = []

    def input_embedding(step: int) -> Tensor:
        return target.embed(drafts[-1] if step else batch.shifted(1))

    for states in heads.unroll(batch.hidden, input_embedding, num_drafts):
        drafts.append(heads.token_ids(heads.logits(states, target)))
    return torch.stack(drafts, -1)


def starts_of(continuation: Continuation, num_drafts: int) -> range:
    """The rows of a sequence at which drafting starts: what row i proposes is compared with tokens i + 2, ..."""
    first = len(continuation.prompt_token_ids) - 1  # it has read the first token of the continuation
    return range(first, len(continuation.all_token_ids) - 1 - num_drafts)


def measure_heads(
    heads: Eagle3 | Clover, target: FrozenTarget, continuations: Sequence[Continuation], batch_size: int
) -> Acceptance:
    """Acceptance of heads that draft alone, greedily."""
    counts = _Counts()
    for start in range(0, len(continuations), batch_size):
        group = continuations[start : start + batch_size]
        proposed = propose(heads, target, Batch.of(group, heads, target), NUM_DRAFTS).tolist()
        for continuation, rows in zip(group, proposed, strict=True):
            counts.add(continuation, rows.__getitem__)
    return counts.acceptance


def measure_prompt_lookup(continuations: Sequence[Continuation]) -> tuple[Acceptance, int]:
    """Acceptance of prompt lookup, and the shortest match that it is best with, of up to LONGEST_LOOKUP tokens.

    A start at which nothing matches counts as one whose first draft is refused.
    """
    best: tuple[Acceptance, int] | None = None
    for shortest in range(1, LONGEST_LOOKUP + 1):
        counts = _Counts()
        for continuation in continuations:
            tokens = continuation.all_token_ids

            def look_up(row: int, tokens: list[int] = tokens, shortest: int = shortest) -> list[int]:
                return ngram_ref(tokens[: row + 2], shortest, LONGEST_LOOKUP, NUM_DRAFTS)[0]

            counts.add(continuation, look_up)
        if best is None or counts.acceptance.mean_length > best[0].mean_length:
            best = counts.acceptance, shortest
    return best


class _Counts:
    def __init__(self) -> None:
        self._starts = 0
        self._accepted = [0] * NUM_DRAFTS

    def add(self, continuation: Continuation, drafts_at: Callable[[int], Sequence[int]]) -> None:
        """Count the drafts at every start of a continuation."""
        tokens = continuation.all_token_ids
        for row in starts_of(continuation, NUM_DRAFTS):
            self._starts += 1
            for position, draft in enumerate(drafts_at(row)):
                if draft != tokens[row + 2 + position]:
                    break
                self._accepted[position] += 1

    @property
    def acceptance(self) -> Acceptance:
        return Acceptance(self._starts, tuple(self._accepted))
