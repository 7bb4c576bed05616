"""Whether to go by halves: where that is quicker, and for a hundredth of the time that it takes to find out."""

from __future__ import annotations

import random

import pytest

from specpaged.speculation.cost_model import CostModel
from specpaged.speculation.overlap_choice import OverlapChoice, Stint, expected_ratio
from specpaged.speculation.pass_seconds import PassSeconds
from specpaged.speculation.selection import select


class Machine:
    """What steps of one batch size take: all of it V + D, half of it by halves as long as `ratio` says; with noise."""

    def __init__(self, ratio, noise=0.02, num_seqs=8, seed=0, verify=6e-3, draft=3e-3):
        self.rng = random.Random(seed)
        self.ratio, self.noise, self.num_seqs = ratio, noise, num_seqs
        self.verify, self.draft = verify, draft
        self.seconds, self.rounds, self.num_halved = 0.0, 0, 0

    def run(self, choice, num_rounds):
        while self.rounds < num_rounds * self.num_seqs:
            by_halves = choice.by_halves(self.num_seqs)
            whole = (self.verify + self.draft) * self.rng.lognormvariate(0, self.noise)
            seconds = whole * self.ratio / 2 if by_halves else whole
            num_rounds_of = self.num_seqs // 2 if by_halves else self.num_seqs
            choice.heard(self.num_seqs, Stint(by_halves, num_rounds_of, seconds, self.verify, self.draft))
            self.seconds += seconds
            self.rounds += num_rounds_of
            self.num_halved += by_halves

    @property
    def over_whole(self):
        """Speed, over that of steps of all."""
        return self.rounds / self.num_seqs * (self.verify + self.draft) / self.seconds


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ratio", [0.97, 1.0, 1.05, 1.4, 2.0, 5.0])
def test_where_halves_are_slower_little_is_lost_by_finding_out(ratio, seed):
    for num_rounds in (50, 300, 1000, 5000):
        machine = Machine(ratio, seed=seed)
        machine.run(OverlapChoice(lambda _: None), num_rounds)
        assert machine.over_whole > 0.98


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ratio", [0.6, 0.8, 0.9])
def test_where_halves_are_quicker_they_are_found(ratio, seed):
    choice = OverlapChoice(lambda _: None)
    Machine(ratio, seed=seed).run(choice, 2000)
    after = Machine(ratio, seed=seed + 10)
    after.run(choice, 2000)
    assert after.over_whole > 0.97 / ratio
    slower = Machine(1.3, seed=seed)  # a neighbour has come, or the batch is of another kind
    slower.run(choice, 6000)
    assert not choice.by_halves(8)


def test_where_nothing_is_promised_nothing_is_tried():
    machine = Machine(0.5, draft=3e-5)  # drafting is next to nothing: there is nothing to hide
    machine.run(OverlapChoice(lambda _: None), 3000)
    assert machine.num_halved == 0
    machine = Machine(0.5)
    machine.run(OverlapChoice(lambda _: 1.2), 3000)  # so the costs say
    assert machine.num_halved == 0


def test_what_a_trial_has_shown_is_expected_of_other_batch_sizes_too():
    choice = OverlapChoice(lambda _: 0.7)
    Machine(1.5).run(choice, 3000)
    other = Machine(1.5, num_seqs=32)
    other.run(choice, 300)
    assert other.num_halved == 0


def test_steps_of_another_kind_than_was_asked_for_are_not_heard():
    choice = OverlapChoice(lambda _: None)
    assert not choice.by_halves(8)
    for _ in range(1000):
        choice.heard(8, Stint(True, 4, 1e-3))
        choice.heard(64, Stint(False, 64, 1e-3))
    assert not choice.by_halves(8)


def passes(seconds, per_row):
    return PassSeconds([1, 64, 128], [seconds + n * per_row for n in (1, 64, 128)])


def test_expected_times_are_minedrafts_model_where_arithmetic_binds():
    costs = CostModel(passes(1e-9, 1e-3), passes(1e-9, 0.25e-3))  # 5 rows of the target, some 4.25 of the draft
    ratio = expected_ratio(costs, 16, 4, 0.0)
    verify, draft = 5 * 1e-3, 4.25 * 0.25e-3
    assert ratio == pytest.approx(max(verify, draft) / (verify + draft), rel=0.03)
    dear = CostModel(passes(1e-9, 1e-3), passes(1e-9, 4e-3))
    assert expected_ratio(dear, 16, 4, 0.0) == pytest.approx(17 / (5 + 17), rel=0.03)


def test_halves_read_all_weights_each():
    costs = CostModel(passes(1e-3, 1e-9), passes(0.2e-3, 1e-9))  # whatever the rows
    assert expected_ratio(costs, 16, 5, 0.0) == pytest.approx(2 / 2, rel=0.03)


def test_where_drafting_is_hidden_drafts_are_worth_more():
    chances = [[0.7, 0.5, 0.35, 0.25]] * 4
    verify = [10.0 + 0.2 * n for n in range(17)]
    drafting = ([0.0] + [2.5] * 4,) * 2
    apart = select(chances, verify, drafting, plain_seconds=10.0)
    beside = select(chances, verify, drafting, plain_seconds=10.0, overlaps=True)
    assert sum(beside.counts) > sum(apart.counts)
    assert beside.tokens_per_second > apart.tokens_per_second
    longer = select(chances, verify, ([0.0] + [9.0] * 4,) * 2, plain_seconds=10.0, overlaps=True)
    assert max(longer.counts) < max(beside.counts)  # as long as drafts are in time
