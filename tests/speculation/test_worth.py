"""A drafter without a model is asked as long as what it finds is worth its time."""

from __future__ import annotations

import random

import pytest

from specpaged.speculation.controller import Candidate
from specpaged.speculation.lookups import LookupController
from specpaged.speculation.worth import Worth
from tests.speculation.simulation import costs


def proposals(worth, num, finds, tokens, price, told=1.0, seed=0):
    """So many, as long as that pays, each of `price` plain steps; a share of those that find anything is told."""
    rng = random.Random(seed)
    for _ in range(num):
        found = rng.random() < finds
        if worth.count(found) or (found and rng.random() < told):
            worth.add(tokens, 1.0 + price, 1.0 + price)
        if not worth.pays:
            break


@pytest.mark.parametrize("told", [1.0, 0.2])
@pytest.mark.parametrize(("price", "pays"), [(0.01, True), (0.5, False)])
def test_finds_that_are_rare_and_good_count_as_often_as_they_come_whoever_is_told_of_them(price, pays, told):
    """One proposal in ten finds two tokens that stand: 1.2 tokens a step."""
    worths = [Worth() for _ in range(20)]
    for seed, worth in enumerate(worths):
        proposals(worth, 300, 0.1, 3.0, price, told, seed)
    assert sum(worth.pays for worth in worths) == (20 if pays else 0)
    if pays:
        speed = sum(worth.speed for worth in worths) / 20
        assert speed == pytest.approx(1.2 / (1.0 + price), rel=0.05)


def test_a_drafter_that_turns_bad_is_asked_no_more_soon_though_few_of_its_drafts_are_told():
    worth = Worth()
    proposals(worth, 500, 1.0, 2.0, 0.4)
    assert worth.is_known
    for num in range(1, 500):  # that all find something, which does not stand
        worth.count(True)
        if num % 12 == 0:
            worth.add(1.0, 1.4, 1.4)
        if not worth.pays:
            break
    assert 24 <= num <= 150
    assert not worth.is_known


def test_one_that_finds_nothing_is_asked_no_more_if_that_takes_long():
    for price, pays in ((0.001, True), (0.4, False)):
        worth = Worth()
        proposals(worth, 100, 0.0, 1.0, price)
        assert worth.pays == pays


def test_a_try_is_paid_for_out_of_a_share_of_the_time():
    worth = Worth()
    assert not worth.tries(2.0)
    assert worth.steps_until_try(2.0, 1.0) == 200
    worth.earn(150.0)
    assert worth.steps_until_try(2.0, 1.0) == 50
    worth.earn(50.0)
    assert worth.tries(2.0)
    assert not worth.tries(2.0)
    worth.earn(1e6)
    assert sum(worth.tries(2.0) for _ in range(10)) == 4


def test_a_plan_without_proposals_is_over_when_there_is_time_for_a_try():
    controller = LookupController(costs(None))
    controller.costs.seconds_per_proposal = 0.05e-3
    controller.worth.pays = False
    num_steps = lengths = 0
    while not (plan := controller.plan([Candidate(0, 8)], num_steps)).is_provisional or not any(plan.num_draft_tokens):
        num_steps = plan.num_steps
        lengths += num_steps
    assert lengths == pytest.approx(4 * 0.05 / (0.01 * 1.1), abs=4)


def test_without_evidence_both_halves_of_a_batch_are_cut_as_each_was_planned():
    controller = LookupController(costs(None), by_evidence=False)
    for _ in range(40):
        controller.observe_drafts("a", 0, 1)
        controller.observe_drafts("b", 0, 1)
    controller.plan([Candidate("a", 8)])
    controller.plan([Candidate("b", 8)])
    assert controller.selects()
    assert controller.select(["a"], [[3.0] * 8]) == controller.select(["b"], [[3.0] * 8]) != [8]
