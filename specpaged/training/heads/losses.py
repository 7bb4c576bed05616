"""The published losses, as sums over rows. Dimensions: R rows, d hidden size, V vocabulary, W draft vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

EAGLE3_DECAY = 0.8  # of a step of test-time training (EAGLE-3, 2503.01840)
CLOVER_DECAY = 0.7  # of a head (Clover-2, 2408.00264)
CLOVER_STATE_WEIGHT = 10.0  # of the hidden states' loss, beside that of tokens


def soft_cross_entropy(logits: Tensor, target_logits: Tensor) -> Tensor:
    """[R, W], [R, W] -> [R]: -sum_v p(v) log q(v), p the softmax of `target_logits` and q that of `logits`."""
    return -(target_logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)


def eagle3_loss(logits: Tensor, target_logits: Tensor, vocabulary: Tensor, in_vocabulary: Tensor) -> Tensor:
    """[R, W], [R, V] -> []: the soft cross-entropy over the draft vocabulary.

    `vocabulary` [W] int64 are the draft vocabulary's token ids and `in_vocabulary` [V] bool says which those are. The
    target's softmax is restricted to them, and a row whose most likely token is none of them does not count.
    """
    counts = in_vocabulary[target_logits.argmax(-1)]
    losses = soft_cross_entropy(logits, target_logits.index_select(-1, vocabulary))
    return torch.where(counts, losses, 0.0).sum()


def clover_loss(states: Tensor, target_states: Tensor, logits: Tensor, target_logits: Tensor) -> Tensor:
    """[R, d] twice, [R, V] twice -> []: 10 SmoothL1(states) + soft cross-entropy(logits)."""
    of_states = F.smooth_l1_loss(states, target_states, reduction="none").mean(-1)
    return (CLOVER_STATE_WEIGHT * of_states + soft_cross_entropy(logits, target_logits)).sum()
