"""Batches of continuations: which ones, a function of the step; with what the target knew of them.

Dimensions: B sequences of T tokens, right-padded; d hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from specpaged.modeling.forward_output import HiddenStates, HiddenStatesRequest
from specpaged.training.heads.continuations import Continuation
from specpaged.training.heads.target import FrozenTarget

MOST_STEPS = 8  # of any heads
WINDOW = 8  # batches whose sequences are sorted by length, so that little is padded


class Heads(Protocol):
    """What Eagle3 and Clover share: see there."""

    method: str
    num_steps: int
    decay: float
    request: HiddenStatesRequest


@dataclass(frozen=True)
class Batch:
    """Sequences and the target's hidden states of all of their tokens."""

    token_ids: Tensor  # [B, T] int64, zeros behind a sequence's end
    lengths: Tensor  # [B] int64
    prompt_lengths: Tensor  # [B] int64
    hidden: HiddenStates  # [B, T, d] float32 each
    weights: tuple[float, ...] = ()  # of a row's loss, by step; see `microbatches`

    @classmethod
    def of(cls, continuations: Sequence[Continuation], heads: Heads, target: FrozenTarget) -> Batch:
        """The continuations, and one pass of the target over them."""
        sequences = [continuation.all_token_ids for continuation in continuations]
        rows = [torch.tensor(tokens) for tokens in sequences]
        return cls(
            torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(target.device),
            torch.tensor([len(tokens) for tokens in sequences], device=target.device),
            torch.tensor([len(c.prompt_token_ids) for c in continuations], device=target.device),
            target.hidden_states(sequences, heads.request),
        )

    def shifted(self, count: int) -> Tensor:
        """[B, T] int64: at row i token i + count, and 0 behind the end."""
        width = self.token_ids.shape[1]
        return torch.nn.functional.pad(self.token_ids[:, count:], (0, min(count, width)))

    @property
    def first_row(self) -> int:
        """The first row of any step whose proposal lies in a continuation, of however many steps; they have no others
        in front of it."""
        return max(0, int(self.prompt_lengths.min()) - 1 - MOST_STEPS)

    def wanted(self, step: int) -> Tensor:
        """[B, max(T - 1 - step, 0)] bool: the rows of a step whose proposal lies in the continuation.

        Row i of step j reads token i + 1 + j, and proposes what the target chose where it had read that.
        """
        position = torch.arange(self.token_ids.shape[1], device=self.token_ids.device)
        chooses = (position >= self.prompt_lengths[:, None] - 1) & (position < self.lengths[:, None])
        return chooses[:, 1 + step :]

    def part(self, start: int, end: int, weights: tuple[float, ...]) -> Batch:
        """Some of the sequences, without the padding that only others need."""
        width = int(self.lengths[start:end].max())

        def cut(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[start:end, :width]

        hidden = HiddenStates(cut(self.hidden.last), tuple(cut(states) for states in self.hidden.layer_inputs))
        lengths, prompt_lengths = self.lengths[start:end], self.prompt_lengths[start:end]
        return Batch(cut(self.token_ids), lengths, prompt_lengths, hidden, weights)

    def microbatches(self, size: int, num_steps: int, decay: float) -> list[Batch]:
        """Parts of `size` sequences. The mean of their weighted sums of row losses is the batch's loss:
        sum over steps j of decay^j times the mean over the rows that step j wants."""
        starts = range(0, len(self.lengths), size)
        counts = [int(self.wanted(step).sum()) for step in range(num_steps)]
        weights = tuple(len(starts) * decay**step / max(1, count) for step, count in enumerate(counts))
        return [self.part(start, min(start + size, len(self.lengths)), weights) for start in starts]


def batch_indices(lengths: Sequence[int], step: int, batch_size: int, seed: int) -> list[int]:
    """Which sequences batch `step` holds: each once an epoch, in a seeded order; one batch holds similar lengths.

    Where there are fewer than `batch_size`, a batch is all of them.
    """
    batch_size = min(batch_size, len(lengths))
    per_epoch = len(lengths) // batch_size
    epoch, place = divmod(step, per_epoch)
    rng = np.random.default_rng((seed, 11, epoch))
    order = rng.permutation(len(lengths))[: per_epoch * batch_size]
    batches: list[list[int]] = []
    for start in range(0, len(order), WINDOW * batch_size):
        window = sorted(order[start : start + WINDOW * batch_size].tolist(), key=lambda i: (lengths[i], i))
        batches += [window[i : i + batch_size] for i in range(0, len(window), batch_size)]
    return batches[int(rng.permutation(len(batches))[place])]
