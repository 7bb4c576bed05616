"""What the figures mean: cycles, rounds, the n-gram baseline."""

import numpy as np
import pytest

from specpaged.training.ngram_baseline import kneser_ney_loss
from specpaged.training.quality import count_accepted, cycle_period, length_before_cycle
from specpaged.training.target import loop_rows


@pytest.mark.parametrize("period", [1, 2, 7, 21])
def test_three_repetitions_at_the_end_are_a_cycle(period):
    block = list(range(100, 100 + period))
    assert cycle_period([1, 2, 3, *block * 3]) == period
    assert length_before_cycle([1, 2, 3, *block * 3]) == 3 + period
    for tokens in ([1, 2, 3, *block * 3, 4], [*range(50), *block * 2]):
        assert cycle_period(tokens) == 0
        assert length_before_cycle(tokens) == len(tokens)


def test_long_periods_and_short_outputs_are_not_cycles():
    assert cycle_period([*range(32)] * 3) == 32
    assert cycle_period([*range(33)] * 3) == 0
    assert cycle_period([5, 5]) == 0
    assert cycle_period([]) == 0


def rounds_one_by_one(target, guess, k):
    """Speculative decoding by the book: `guess(tokens)` is the draft's next token after them."""
    accepted = drafted = done = 0
    while done + k <= len(target):
        proposal = []
        for _ in range(k):
            proposal.append(guess(target[:done] + proposal))
        drafted += k
        for i in range(k):
            if proposal[i] != target[done]:
                break
            accepted, done = accepted + 1, done + 1
        done += 1
    return accepted, drafted


def test_counting_matches_equals_playing_the_rounds():
    assert count_accepted([True, True, False, True, True, True, True, True], 3) == (5, 6)
    rng = np.random.default_rng(0)
    for _ in range(50):
        target = rng.integers(0, 3, 40).tolist()
        table = rng.integers(0, 3, 9).tolist()

        def guess(tokens, table=table):
            return table[3 * tokens[-1] + tokens[-2]] if len(tokens) > 1 else 0

        matches = [guess(target[:i]) == target[i] for i in range(len(target))]
        assert count_accepted(matches, 4) == rounds_one_by_one(target, guess, 4)


def test_ngram_probabilities_sum_to_one():
    rng = np.random.default_rng(0)
    train = rng.integers(0, 8, 400).astype(np.int32)
    for context in (train[:4], train[100:104], np.array([7, 7, 7, 0], np.int32)):
        losses = [kneser_ney_loss(train, np.append(context, t).astype(np.int32), 8) for t in range(8)]
        assert sum(np.exp(-loss) for loss in losses) == pytest.approx(1)


def test_ngram_learns_a_pattern_it_has_seen():
    train = np.tile(np.arange(6, dtype=np.int32), 100)
    assert kneser_ney_loss(train, train[:60], 6) < 0.05
    assert kneser_ney_loss(train, train[59::-1], 6) > 1


def test_loop_rows_turn_into_loops_where_they_say():
    stream = np.random.default_rng(0).integers(0, 2000, 5000).astype(np.int32)
    rows, third = loop_rows(stream, 3, 8, 256)
    assert rows.shape == (8, 257)
    for row, start in zip(rows.tolist(), third.tolist(), strict=True):
        period = cycle_period(row)
        assert period > 0
        assert length_before_cycle(row) == start - period
