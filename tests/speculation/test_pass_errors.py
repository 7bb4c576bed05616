"""Errors of a table of passes are told from the machine's pace: known ones are found, and a neighbour is not one."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specpaged.speculation.pass_errors import PassErrors
from specpaged.speculation.pass_seconds import PassSeconds

NODES = [1, 2, 3, 4, 6, 8, 12, 16, 32, 64]


class Machine:
    """Passes of n rows take 1 + n / 20 seconds by the table, and `slower(n)` times as long in truth, under noise."""

    def __init__(self, slower, seed=0):
        self.slower = slower
        self.rng = random.Random(seed)
        self.errors = PassErrors(PassSeconds(NODES, [1 + 0.05 * n for n in NODES]))

    def run(self, num_rows, count, pace=1.0):
        """5 %, and one pass in twenty three times as slow."""
        for _ in range(count):
            noise = math.exp(self.rng.gauss(0, 0.05)) * (3.0 if self.rng.random() < 0.05 else 1.0)
            seconds = pace * (1 + 0.05 * num_rows) * self.slower(num_rows) * noise
            self.errors.observe(num_rows, math.log(seconds / self.errors.passes.of_rows(num_rows)))

    def found(self, num_rows, others):
        """The logarithm of how much longer than by the first table they take beside the others, as is believed now."""
        of_rows = self.errors.passes.of_rows
        return math.log(of_rows(num_rows) / of_rows(others) / (1 + 0.05 * num_rows) * (1 + 0.05 * others))


@given(seed=st.integers(0, 1000), log_slower=st.floats(-0.4, 0.4), pace=st.sampled_from([0.5, 1.0, 3.0]))
def test_a_few_passes_of_another_kind_say_what_a_thousand_of_one_cannot(seed, log_slower, pace):
    """Who drafts five tokens sees six rows: these, in truth exp(log_slower) times as long as the table says."""
    machine = Machine(lambda n: math.exp(log_slower) if n == 6 else 1.0, seed)
    machine.run(6, 300, pace)
    assert machine.found(6, 1) == pytest.approx(0.0, abs=0.1)
    doubt = machine.errors.doubt(6, 1)
    for _ in range(3):
        machine.run(1, 3, pace)
        machine.run(6, 16, pace)
    assert machine.errors.doubt(6, 1) < 0.5 * doubt
    assert machine.found(6, 1) == pytest.approx(log_slower, abs=0.12)


def test_nodes_between_what_has_been_seen_follow():
    machine = Machine(lambda n: 1.3 if n > 2 else 1.0)
    for _ in range(4):
        machine.run(6, 30)
        machine.run(1, 3)
    assert 0.05 < machine.found(2, 1) < machine.found(3, 1) < machine.found(4, 1) < 0.35
    assert machine.found(12, 6) == pytest.approx(0.0, abs=0.12)  # beyond, all is as it was


@given(seed=st.integers(0, 1000), pace=st.floats(0.2, 5.0))
def test_a_neighbour_who_comes_and_goes_is_no_error(seed, pace):
    machine = Machine(lambda n: 1.0, seed)
    for i in range(8):
        machine.run(6, 30, pace if i % 2 else 1.0)
        machine.run(1, 3, pace if i % 2 else 1.0)
        machine.run(6, 5)  # the neighbour goes behind a trial, or comes
        assert machine.found(6, 1) == pytest.approx(0.0, abs=0.15)


def test_a_pass_that_stands_out_by_far_moves_nothing_but_what_may_come_next():
    machine = Machine(lambda n: 1.0)
    for n in (1, 6):
        machine.run(n, 30)
    before, drift = list(machine.errors.passes.seconds), machine.errors.drift
    machine.errors.observe(6, 5.0)
    assert (machine.errors.passes.seconds, machine.errors.drift) == (before, drift)
    machine.errors.observe(6, drift + 1.0)  # so soon behind it, this is the machine's new pace
    assert machine.errors.drift == pytest.approx(drift + 1.0, abs=0.1)
    assert machine.errors.passes.seconds == pytest.approx(before, rel=0.02)


def test_of_a_pass_that_is_mostly_something_else_its_rows_are_to_blame_for_more():
    """Two thirds of a pass are reading KV, and it takes a tenth longer: rows take 0.3 more."""
    errors = PassErrors(PassSeconds([1, 8, 64], [1.0, 1.0, 1.0]))
    f = errors.passes.of_rows
    for _ in range(20):
        for num_rows, seconds in ((1, 3.0), (8, 3.3)):
            expected = f(num_rows) + 2.0
            errors.observe(num_rows, math.log(seconds / expected), f(num_rows) / expected)
    assert f(8) / f(1) == pytest.approx(1.3, abs=0.05)


def test_more_rows_than_the_table_has_are_as_its_last_ones():
    errors = PassErrors(PassSeconds([1, 5], [1.0, 2.0]))
    errors.observe(100, 0.3)
    assert errors.doubt(100, 5) == pytest.approx(0.0, abs=1e-6)
    assert all(math.isfinite(s) and s > 0 for s in errors.passes.seconds)
