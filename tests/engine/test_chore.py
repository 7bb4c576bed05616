"""What is done now and then takes its share of the time, whatever it takes."""

from hypothesis import given
from hypothesis import strategies as st

from specpaged.engine.chore import Chore

SECONDS, SHARE, FEWEST, MOST = 1e-4, 0.005, 2, 500


@given(st.floats(1.0, 20.0), st.floats(1e-4, 1e-1))
def test_a_chore_takes_no_more_than_its_share_however_slow_it_is(slower, step_seconds):
    chore = Chore(SECONDS, SHARE, FEWEST, MOST)
    for _ in range(60):
        chore.took(slower * SECONDS)
    steps = chore.every(step_seconds)
    share = slower * SECONDS / (steps * step_seconds)
    assert share <= 1.001 * SHARE or steps == MOST
    assert share >= SHARE * (1 - 1 / steps) or steps == FEWEST  # and no more seldom than that


def test_a_single_time_that_stands_out_says_little_and_quick_ones_make_it_no_more_often():
    chore = Chore(SECONDS, SHARE, FEWEST, MOST)
    usual = chore.every(1e-3)
    for _ in range(9):
        chore.took(0.0)
    assert chore.every(1e-3) == usual == 20
    chore.took(1.0)  # stopped by the machine, say
    assert usual < chore.every(1e-3) < 2 * usual
    for _ in range(30):
        chore.took(SECONDS)
    assert chore.every(1e-3) <= usual + 1


def test_a_chore_is_done_as_often_as_may_be_while_nothing_is_known_of_steps():
    assert Chore(SECONDS, SHARE, FEWEST, MOST).every(0.0) == FEWEST
