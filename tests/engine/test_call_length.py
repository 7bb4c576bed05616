"""Calls are as long as nobody has to wait for them."""

from hypothesis import given
from hypothesis import strategies as st

from specpaged.engine.call_length import FEW, LONGEST, CallLength


@given(st.integers(1, 40), st.floats(1e-5, 1.0), st.integers(1, 64))
def test_calls_have_few_rounds_or_take_no_longer_than_they_may(most, round_seconds, num_seqs):
    length = CallLength(most)
    assert length.num_rounds(num_seqs) == min(FEW, most)  # as long as nothing is known
    for _ in range(5):
        num_rounds = length.num_rounds(num_seqs)
        length.took(num_seqs, num_rounds, num_rounds * round_seconds)
    num_rounds = length.num_rounds(num_seqs)
    assert min(FEW, most) <= num_rounds <= most
    assert num_rounds <= FEW or num_rounds * round_seconds <= 1.001 * LONGEST
    assert num_rounds == most or min(most, 2 * num_rounds) * round_seconds > 0.999 * LONGEST


def test_what_a_few_sequences_take_says_nothing_of_many():
    length = CallLength(16)
    length.took(1, 4, 4e-3)
    assert [length.num_rounds(n) for n in (1, 2, 32)] == [16, FEW, FEW]


def test_one_call_that_was_slow_makes_none_shorter():
    length = CallLength(16)
    for _ in range(9):
        length.took(1, 16, 16e-3)
    length.took(1, 16, 50e-3)
    assert length.num_rounds(1) == 16
    for _ in range(9):
        length.took(1, 16, 50e-3)
    assert length.num_rounds(1) == 8
