"""Rates that warm up, hold, and fall to zero at the end of a budget, of steps or of time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specpaged.training.heads.budget import DECAY_SHARE, Budget


@given(st.integers(1, 500))
def test_a_budget_of_steps_ends_with_them(steps):
    budget = Budget(steps, None)
    factors = [budget.rate_factor(step) for step in range(steps)]
    assert all(0 < factor <= 1 for factor in factors)
    assert budget.is_over(steps)
    assert not budget.is_over(steps - 1)
    peak = factors.index(max(factors))
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)


@given(st.floats(1, 1000), st.floats(0.05, 20))
def test_a_budget_of_time_is_kept_where_steps_take_alike(seconds, each):
    budget, step, shares = Budget(None, seconds), 0, []
    while not budget.is_over(step):
        assert budget.rate_factor(step) > 0
        step += 1
        budget.observe(step, step * each)
        shares.append(budget.progress(step, step * each))
    assert (1 - DECAY_SHARE) * seconds <= step * each <= seconds + 2 * each
    assert shares == sorted(shares)
    assert shares[-1] == 1
