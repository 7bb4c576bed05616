"""The loss of a batch: heads unrolled over the target's own text, against what the target thought of it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specpaged.training.heads.batches import Batch
from specpaged.training.heads.clover import Clover
from specpaged.training.heads.eagle3 import Eagle3
from specpaged.training.heads.target import FrozenTarget

MAX_LOGITS = 2**25  # of which a piece of the loss holds a few copies; more rows are computed piece by piece


def distillation_loss(heads: Eagle3 | Clover, target: FrozenTarget, batch: Batch) -> Tensor:
    """[]: the sum over steps and their rows, by `batch.weights`. Differentiable in the heads' parameters.

    Step j reads the text's own token i + 1 + j at row i, and the hidden states that came of the steps before.
    """
    total = torch.zeros((), device=target.device)
    num_steps = min(heads.num_steps, batch.token_ids.shape[1] - 1)
    first_row = batch.first_row

    def input_embedding(step: int) -> Tensor:
        token_ids = batch.shifted(1 + step)
        return target.embed(token_ids[:, first_row:] if step else token_ids)

    with torch.autocast("cuda", torch.bfloat16, enabled=target.device.type == "cuda"):
        for step, states in enumerate(heads.unroll(batch.hidden, input_embedding, num_steps, first_row)):
            rows = batch.wanted(step)[:, first_row:]
            wanted = states[:, : rows.shape[1]][rows]
            last = batch.hidden.last[:, 1 + step + first_row :][rows]
            total = total + batch.weights[step] * _loss(heads, target, wanted, last)
    return total


def _loss(heads: Eagle3 | Clover, target: FrozenTarget, states: Tensor, last: Tensor) -> Tensor:
    """[R, d] twice -> []; logits are made again for the gradient where they are many."""
    size = max(1, MAX_LOGITS // target.config.vocab_size)
    if len(states) <= size:
        return heads.loss(states, last, target)
    pieces = zip(states.split(size), last.split(size), strict=True)
    return sum(checkpoint(heads.loss, *piece, target, use_reentrant=False) for piece in pieces)
