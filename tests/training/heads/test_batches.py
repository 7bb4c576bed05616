"""Which rows count, by hand; what a batch weighs; which sequences come when."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specpaged.training.heads.batches import Batch, batch_indices
from specpaged.training.heads.distillation import distillation_loss
from tests.training.heads.conftest import random_text


def test_rows_of_a_step_are_those_whose_proposal_lies_in_the_continuation(frozen, heads):
    # Prompt a b c, continuation d e: the target chose d at c, e at d, and something more at e.
    batch = Batch.of(random_text([(3, 2), (1, 1)]), heads, frozen)
    assert batch.wanted(0).tolist() == [[False, True, True, True], [True, False, False, False]]
    assert batch.wanted(1).tolist() == [[True, True, True], [False, False, False]]
    assert batch.wanted(2).tolist() == [[True, True], [False, False]]
    assert batch.shifted(2)[0].tolist() == [*batch.token_ids[0, 2:].tolist(), 0, 0]


def test_the_loss_is_the_weighted_sum_of_row_losses_however_it_is_cut(frozen, heads):
    batch = Batch.of(random_text([(13, 9), (3, 6), (12, 30), (20, 2)]), heads, frozen)
    unrolled = heads.unroll(batch.hidden, lambda step: frozen.embed(batch.shifted(1 + step)), heads.num_steps)
    expected = torch.zeros(())
    for step, states in enumerate(unrolled):
        losses = []
        for b, (prompt, length) in enumerate(zip(batch.prompt_lengths.tolist(), batch.lengths.tolist(), strict=True)):
            for row in range(length):
                place = row + 1 + step
                if prompt - 1 <= place < length:
                    losses.append(heads.loss(states[b, row : row + 1], batch.hidden.last[b, place : place + 1], frozen))
        expected = expected + heads.decay**step * sum(losses) / len(losses)
    for size in (1, 3, 4):
        parts = batch.microbatches(size, heads.num_steps, heads.decay)
        loss = sum(distillation_loss(heads, frozen, part) for part in parts) / len(parts)
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)


def test_a_loss_in_pieces_has_the_same_value_and_gradient(frozen, heads, monkeypatch):
    (part,) = Batch.of(random_text([(3, 12)]), heads, frozen).microbatches(4, heads.num_steps, heads.decay)
    results = []
    for most in (2**25, 2 * frozen.config.vocab_size):
        monkeypatch.setattr("specpaged.training.heads.distillation.MAX_LOGITS", most)
        loss = distillation_loss(heads, frozen, part)
        results.append((loss, *torch.autograd.grad(loss, list(heads.parameters()))))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@given(st.lists(st.integers(2, 50), min_size=1, max_size=40), st.integers(1, 9), st.integers(0, 3))
def test_each_sequence_comes_at_most_once_an_epoch_and_none_is_left_out_for_ever(lengths, batch_size, seed):
    size = min(batch_size, len(lengths))
    per_epoch = len(lengths) // size
    seen = set()
    for epoch in range(30):
        batches = [batch_indices(lengths, epoch * per_epoch + i, batch_size, seed) for i in range(per_epoch)]
        assert all(len(batch) == size for batch in batches)
        flat = [i for batch in batches for i in batch]
        assert len(set(flat)) == len(flat)
        seen.update(flat)
    if size * 10 <= len(lengths) * 5:
        assert len(seen) == len(lengths)


@pytest.mark.parametrize("step", [0, 7, 23])
def test_a_batch_is_a_function_of_the_step(step):
    lengths = list(range(2, 40))
    assert batch_indices(lengths, step, 4, 0) == batch_indices(lengths, step, 4, 0)
    assert batch_indices(lengths, step, 4, 0) != batch_indices(lengths, step, 4, 1)
