"""The best size is found where it can be known: at the maximum of what was put into laws and costs."""

import math

import numpy as np
import pytest

from specpaged.studies.scaling.laws import fit
from specpaged.studies.scaling.optimum import RoundLine, Speeds

SIZES = [2**n for n in range(14, 22)]


def law_of(k, slope=0.1, noise=0.0):
    rng = np.random.default_rng(k)
    values = [1 + slope * k * (math.log2(n) - 12) / 5 + noise * rng.normal() for n in SIZES]
    return fit([{"parameters": n} for n in SIZES], values, ("parameters",))


def speeds(cost_per_million, noise=0.0, plain=1.0):
    """Rounds cost a plain one's time, and for each draft so much per million parameters."""
    laws = {k: law_of(k, noise=noise) for k in (1, 2, 4)}
    lines = {
        k: RoundLine.fit(SIZES, [plain * (1 + 0.05 * k + k * cost_per_million * n / 1e6) for n in SIZES]) for k in laws
    }
    return Speeds(laws, lines, plain, SIZES)


def test_the_optimum_is_the_best_of_all_sizes_and_ks():
    of = speeds(0.3)
    best = of.optimum(8)
    table = {(k, n): float(of.at(np.array([n]), k)[0]) for k in (1, 2, 4) for n in of.sizes}
    assert best.speed == pytest.approx(max(table.values()))
    k, n = max(table, key=table.get)
    assert (best.num_drafts, best.parameters.value) == (k, n)
    assert of.best_k(n) == k
    assert max(of.envelope()) == pytest.approx(best.speed)


def test_a_dearer_draft_is_best_smaller():
    cheap, dear = (speeds(cost).optimum(1).parameters.value for cost in (0.05, 0.8))
    assert dear < cheap / 2


def test_the_optimums_interval_holds_it_and_widens_with_noise():
    narrow, wide = (speeds(0.3, noise).optimum(1).parameters for noise in (0.0, 0.02))
    for interval in (narrow, wide):
        assert interval.low <= interval.value <= interval.high
    assert wide.high / wide.low > narrow.high / narrow.low


def test_where_no_draft_does_better_than_none_k_is_0():
    best = speeds(50.0).optimum(32)
    assert best.num_drafts == 0
    assert best.speed <= 1
    assert not best.is_inside  # smaller still would be better


def test_a_law_never_promises_more_tokens_than_a_round_can_have():
    of = speeds(0.0)
    assert of.at(np.array([2.0**400]), 2)[0] == pytest.approx(3 / 1.1)
    assert of.at(np.array([2.0]), 2)[0] == pytest.approx(1 / 1.1)


def test_costs_are_a_straight_line_of_size_that_never_falls():
    line = RoundLine.fit([1e5, 2e5, 4e5], [1.1, 1.2, 1.4])
    assert (line.base, line.slope, line.r_squared) == pytest.approx((1.0, 1e-6, 1.0))
    falling = RoundLine.fit([1e5, 2e5, 4e5], [1.2, 1.1, 1.0])
    assert falling.slope == 0
    assert falling.base == pytest.approx(1.1)
