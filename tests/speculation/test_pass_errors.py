"""Errors of a table of passes are told from the machine's pace: known ones are found, and a neighbour is not one."""

from __future__ import annotations

import math
import random

import pytest

from specpaged.speculation.cost_model import CostModel
from specpaged.speculation.pass_errors import PassErrors
from specpaged.speculation.pass_seconds import PassSeconds, PassShape

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


@pytest.mark.parametrize("log_slower", [-0.4, 0.1, 0.4])
@pytest.mark.parametrize("pace", [0.5, 3.0])
def test_a_few_passes_of_another_kind_say_what_a_thousand_of_one_cannot(log_slower, pace):
    """Who drafts five tokens sees six rows: these, in truth exp(log_slower) times as long as the table says."""
    wrong = []
    for seed in range(40):
        machine = Machine(lambda n: math.exp(log_slower) if n == 6 else 1.0, seed)
        machine.run(6, 100, pace)
        assert machine.found(6, 1) == pytest.approx(0.0, abs=0.1)
        doubt = machine.errors.doubt(6, 1)
        for _ in range(3):
            machine.run(1, 3, pace)
            machine.run(6, 16, pace)
        assert machine.errors.doubt(6, 1) < 0.6 * doubt
        wrong.append(abs(machine.found(6, 1) - log_slower))
    assert sorted(wrong)[20] < 0.04
    assert sum(x > 0.1 for x in wrong) <= 2


@pytest.mark.parametrize("log_slower", [-0.7, 0.7])
def test_what_becomes_another_cost_when_all_is_known_is_learned_anew(log_slower):
    costs = {6: 1.0}
    machine = Machine(lambda n: costs.get(n, 1.0))
    for trial in range(18):
        if trial == 8:
            costs[6] = math.exp(log_slower)
        machine.run(1, 3)
        machine.run(6, 16)
    assert machine.found(6, 1) == pytest.approx(log_slower, abs=0.15)


def test_nodes_between_what_has_been_seen_follow():
    machine = Machine(lambda n: 1.3 if n > 2 else 1.0)
    for _ in range(4):
        machine.run(6, 30)
        machine.run(1, 3)
    assert 0.05 < machine.found(2, 1) < machine.found(3, 1) < machine.found(4, 1) < 0.35
    assert machine.found(12, 6) == pytest.approx(0.0, abs=0.12)  # beyond, all is as it was


@pytest.mark.parametrize("pace", [0.3, 1.2, 1.5, 2.0, 5.0])
def test_a_neighbour_who_comes_and_goes_is_no_error(pace):
    wrong = []
    for seed in range(20):
        machine = Machine(lambda n: 1.0, seed)
        for i in range(8):
            machine.run(6, 30, pace if i % 2 else 1.0)
            machine.run(1, 3, pace if i % 2 else 1.0)
            machine.run(6, 5)  # the neighbour comes, or goes, behind a trial
            wrong.append(abs(machine.found(6, 1)))
    assert sorted(wrong)[80] < 0.05
    assert sum(x > 0.15 for x in wrong) <= 4


@pytest.mark.parametrize("pace", [1.5, 2.0, 5.0])
def test_a_neighbour_who_comes_and_goes_with_one_trial_is_suspected_of_no_error_until_the_next_one(pace):
    wrong, suspected = [], [0, 0]
    for seed in range(20):
        machine = Machine(lambda n: 1.0, seed)
        for trial in range(4):
            machine.run(6, 30)
            machine.run(1, 3, pace if trial == 3 else 1.0)
        machine.run(6, 30)
        wrong.append(abs(machine.found(6, 1)))
        suspected[0] += machine.errors.suspects
        machine.run(10, 3)  # of a kind that is nobody's
        machine.run(6, 3)
        machine.run(1, 3)
        machine.run(6, 30)
        suspected[1] += machine.errors.suspects
        wrong.append(abs(machine.found(6, 1)))
    assert sorted(wrong)[20] < 0.08
    assert sum(x > 0.15 for x in wrong) <= 4
    assert suspected[0] >= (15 if pace >= 2.0 else 1)
    assert suspected[1] <= 2


def test_a_neighbour_who_comes_with_one_trial_and_goes_with_another_is_not_suspected():
    suspected = 0
    for seed in range(20):
        machine = Machine(lambda n: 1.0, seed)
        machine.run(6, 30)
        machine.run(1, 3, 2.0)
        machine.run(6, 60, 2.0)
        machine.run(1, 3)
        machine.run(6, 30)
        suspected += machine.errors.suspects
    assert suspected <= 2


def test_what_comes_and_goes_with_two_trials_is_an_error_and_a_third_one_says_how_large():
    wrong, suspected = [], 0
    for seed in range(20):
        machine = Machine(lambda n: 3.0 if n == 6 else 1.0, seed)
        machine.run(6, 100, 1 / 3)
        for trial in range(3):
            machine.run(1, 4, 1 / 3)
            machine.run(6, 30, 1 / 3)
            suspected += trial == 0 and machine.errors.suspects
        wrong.append(abs(machine.found(6, 1) - math.log(3.0)))
    assert suspected >= 15
    assert sum(x > 0.15 for x in wrong) <= 2


def test_a_pass_that_stands_out_says_nothing_until_the_next_one_does_too():
    machine = Machine(lambda n: 1.0)
    for n in (1, 6):
        machine.run(n, 30)
    errors = machine.errors
    before, drift = list(errors.passes.seconds), errors.drift
    for surprise in (drift + 5.0, drift, drift - 1.0, drift + 1.0):
        errors.observe(6, surprise)
    assert errors.drift == pytest.approx(drift, abs=0.05)
    errors.observe(6, drift + 1.0)
    assert errors.drift == pytest.approx(drift + 1.0, abs=0.1)
    assert errors.passes.seconds == pytest.approx(before, rel=0.05)


def test_of_a_pass_that_is_mostly_something_else_its_rows_are_to_blame_for_more():
    """Two thirds of a pass are reading KV, and it takes a tenth longer: rows take 0.3 more."""
    errors = PassErrors(PassSeconds([1, 8, 64], [1.0, 1.0, 1.0]))
    f = errors.passes.of_rows
    for _ in range(20):
        for num_rows, seconds in ((1, 3.0), (8, 3.3)):
            expected = f(num_rows) + 2.0
            errors.observe(num_rows, math.log(seconds / expected), f(num_rows) / expected)
    assert f(8) / f(1) == pytest.approx(1.3, abs=0.05)


@pytest.mark.parametrize("log_slower", [-0.5, 0.9])
def test_what_kv_takes_is_told_from_what_rows_take(log_slower):
    """32 rows are those of 32 sequences or of 8 that draft: they say which of both was wrong, the machine's pace aside,
    and what passes take that have not been seen.
    """
    true = PassSeconds(NODES, [1 + 0.05 * n for n in NODES], per_sequence=0.03 * math.exp(log_slower))
    wrong = []
    for seed in range(20):
        rng = random.Random(seed)
        passes = PassSeconds(NODES, true.seconds, per_sequence=0.03)
        costs = CostModel(passes)
        for _ in range(20):
            for shape in (PassShape(32, 32), PassShape(32, 8), PassShape(8, 8)):
                for _ in range(5):
                    costs.observe_target(shape, 1.5 * true.of(shape) * math.exp(rng.gauss(0, 0.05)))
        many, few = PassShape(24, 24), PassShape(24, 3)
        wrong.append(abs(math.log(passes.of(many) / passes.of(few) * true.of(few) / true.of(many))))
    assert sorted(wrong)[10] < 0.05
    assert max(wrong) < 0.12


def test_what_has_not_been_seen_for_long_is_as_uncertain_as_at_first_and_no_more():
    """20,000 passes of one row that read next to no KV; then one that reads much takes 2.2 times as long, by chance."""
    errors = PassErrors(PassSeconds(NODES, [1 + 0.05 * n for n in NODES], per_sequence=0.03))
    rng, doubt = random.Random(0), errors.doubt(64, 1)
    for _ in range(20_000):
        errors.observe(1, rng.gauss(0, 0.05))
    assert doubt / 1.05 < errors.doubt(64, 1) < 1.05 * doubt
    per_sequence = errors.passes.per_sequence
    errors.observe(8, math.log(2.2), 0.7, 0.3)
    assert errors.passes.per_sequence == per_sequence


def test_more_rows_than_the_table_has_are_as_its_last_ones():
    errors = PassErrors(PassSeconds([1, 5], [1.0, 2.0]))
    errors.observe(100, 0.3)
    assert errors.doubt(100, 5) == pytest.approx(0.0, abs=1e-6)
    assert all(math.isfinite(s) and s > 0 for s in errors.passes.seconds)


def test_passes_of_half_as_many_rows_more_leave_those_of_twice_as_many_in_doubt():
    """48 rows may be on another stair than 64."""
    machine = Machine(lambda n: 1.3 if n == 48 else 1.0)
    for _ in range(10):
        machine.run(32, 8)
        machine.run(48, 8)
    assert machine.found(48, 32) == pytest.approx(math.log(1.3), abs=0.05)
    assert machine.errors.doubt(64, 48) > 3 * machine.errors.doubt(48, 32)
