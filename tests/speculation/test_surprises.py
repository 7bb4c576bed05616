"""Of the last surprises it is the median that counts, and of all that were wanted."""

from __future__ import annotations

import math

import pytest

from specpaged.speculation.surprises import FEW, FEWEST, Surprises


def test_a_shift_is_what_most_of_those_show_that_were_wanted():
    """Seven of fifteen are no shift, whichever came first."""
    num_odd = FEWEST // 2
    for last in ([0.5] * num_odd + [0.0] * (FEWEST - num_odd), [0.0] * (FEWEST - num_odd) + [0.5] * num_odd):
        surprises = Surprises()
        shifts = []
        for surprise in last:
            surprises.add(surprise)
            shifts.append(surprises.take_shift())
        assert shifts == [1.0] * FEWEST
        surprises.add(0.5)
        assert surprises.take_shift() == 1.0, "as the median was some passes ago"


def test_a_shift_is_taken_once():
    surprises = Surprises()
    for _ in range(FEWEST - 1):
        surprises.add(0.5)
        assert surprises.take_shift() == 1.0
    surprises.add(0.5)
    assert surprises.take_shift() == pytest.approx(math.exp(0.5))
    assert surprises.take_shift() == 1.0
    for _ in range(FEW):
        surprises.add(0.5)
    assert surprises.take_shift() == 1.0
    assert surprises.take_shift(FEW) == pytest.approx(math.exp(0.5)), "where a few are enough, by the newest ones"
