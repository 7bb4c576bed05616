"""Rates that warm up, hold, and fall to zero at the end of a budget, of steps or of time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specpaged.training.heads.budget import Budget


@given(st.integers(1, 500))
def test_a_budget_of_steps_ends_with_them_whatever_the_time(steps):
    budget = Budget(steps, None)
    factors = [budget.rate_factor(step, 1e9) for step in range(steps)]
    assert all(0 < factor <= 1 for factor in factors)
    assert budget.is_over(steps, 0.0)
    assert not budget.is_over(steps - 1, 1e9)
    peak = factors.index(max(factors))
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)


def test_a_budget_of_time_ends_with_it_whatever_the_steps():
    budget = Budget(None, 100.0)
    assert not budget.is_over(10**6, 99.9)
    assert budget.is_over(1, 100.0)
    assert budget.rate_factor(500, 50.0) == 1
    assert budget.rate_factor(500, 82.5) == pytest.approx(0.5)
    assert budget.rate_factor(1, 50.0) == pytest.approx(0.1)
    assert budget.progress(3, 250.0) == 1
