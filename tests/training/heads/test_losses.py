"""The published losses on cases worked by hand, and against loops."""

from __future__ import annotations

import math

import torch

from specpaged.training.heads.losses import clover_loss, eagle3_loss, soft_cross_entropy


def test_soft_cross_entropy_of_a_worked_example():
    # p = (3/4, 1/4), q = (1/2, 1/2)
    loss = soft_cross_entropy(torch.zeros(1, 2), torch.tensor([[math.log(3.0), 0.0]]))
    assert math.isclose(loss.item(), math.log(2), rel_tol=1e-6)


def test_eagle3_counts_rows_whose_token_is_in_the_vocabulary_and_renormalises_the_target_there():
    vocabulary, in_vocabulary = torch.tensor([1, 3]), torch.tensor([False, True, False, True])
    target_logits = torch.tensor([
        [0.0, math.log(3.0), -1.0, 0.0],  # of tokens 1 and 3: 3/4 and 1/4
        [9.0, 1.0, 2.0, 3.0],  # token 0 is most likely, which no draft can be
    ])  # fmt: skip
    logits = torch.tensor([[0.0, 0.0], [5.0, -5.0]])
    assert math.isclose(eagle3_loss(logits, target_logits, vocabulary, in_vocabulary).item(), math.log(2), rel_tol=1e-6)


def test_losses_equal_loops():
    torch.manual_seed(0)
    rows, size, vocab = 6, 5, 7
    vocabulary = torch.tensor([0, 2, 3, 6])
    in_vocabulary = torch.zeros(vocab, dtype=torch.bool)
    in_vocabulary[vocabulary] = True
    logits, target_logits = torch.randn(rows, 4), torch.randn(rows, vocab)
    expected = 0.0
    for row in range(rows):
        best = max(range(vocab), key=lambda v: target_logits[row, v].item())
        if best in vocabulary.tolist():
            weights = [math.exp(target_logits[row, v]) for v in vocabulary.tolist()]
            total = sum(math.exp(x) for x in logits[row].tolist())
            for weight, logit in zip(weights, logits[row].tolist(), strict=True):
                expected -= weight / sum(weights) * math.log(math.exp(logit) / total)
    assert math.isclose(eagle3_loss(logits, target_logits, vocabulary, in_vocabulary).item(), expected, rel_tol=1e-5)

    states, target_states = 2 * torch.randn(rows, size), torch.randn(rows, size)
    logits = torch.randn(rows, vocab)
    expected = soft_cross_entropy(logits, target_logits).sum().item()
    for row in range(rows):
        for a, b in zip(states[row].tolist(), target_states[row].tolist(), strict=True):
            apart = abs(a - b)
            expected += 10 * (apart**2 / 2 if apart < 1 else apart - 0.5) / size
    assert math.isclose(clover_loss(states, target_states, logits, target_logits).item(), expected, rel_tol=1e-5)
