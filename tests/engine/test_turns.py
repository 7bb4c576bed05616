"""A text that turns is found in the counts of a few rounds; one that does not, hardly ever is."""

import random

import pytest

from specpaged.engine.turns import Turns


def turns_of(acceptance, num_rounds, seed, num_drafts=4, expects=None):
    """When a text of so many rounds was found to turn, its drafts standing with `acceptance(round)`; what was told."""
    rng, turns, found = random.Random(seed), Turns(), []
    for i in range(num_rounds):
        num_accepted = next((j for j in range(num_drafts) if rng.random() > acceptance(i)), num_drafts)
        turned = turns.add("a", num_accepted, int(num_accepted < num_drafts), expects)
        if turned is not None:
            found.append((i, turned))
    return found


@pytest.mark.parametrize(("before", "after", "within"), [(0.9, 0.2, 9), (0.2, 0.9, 5), (0.3, 0.9, 8)])
def test_a_text_that_turns_is_found_within_a_few_rounds(before, after, within):
    delays = []
    for seed in range(50):
        found = turns_of(lambda i: before if i < 40 else after, 60, seed)
        delays += [i - 40 for i, _ in found if i >= 40][:1]
    assert len(delays) >= 45
    assert sorted(delays)[len(delays) * 9 // 10] <= within


@pytest.mark.parametrize("acceptance", [0.1, 0.3, 0.6, 0.9])
def test_a_text_that_does_not_turn_is_hardly_ever_found_to(acceptance):
    num_found = sum(len(turns_of(lambda i: acceptance, 400, seed)) for seed in range(10))
    assert num_found <= 0.005 * 4000


def test_a_new_text_that_is_worse_than_expected_is_found_within_some_rounds():
    delays = []
    for seed in range(50):
        found = turns_of(lambda i: 0.2, 40, seed, expects=lambda _: 0.6)
        delays += [i for i, _ in found][:1]
    assert len(delays) >= 40  # none where nothing is expected
    assert sorted(delays)[len(delays) * 9 // 10] <= 16


@pytest.mark.parametrize(("acceptance", "expected", "most"), [(0.6, 0.6, 10), (0.9, 0.9, 10), (0.9, 0.6, 0)])
def test_a_new_text_that_is_no_worse_than_expected_is_seldom_found_to_be(acceptance, expected, most):
    """Of a hundred texts: it costs a plan. Drafts that were selected are better than was expected of all."""
    num_found = sum(len(turns_of(lambda i: acceptance, 12, seed, expects=lambda _: expected)) for seed in range(100))
    assert num_found <= most


def test_what_is_told_is_what_came_since_the_text_was_judged_last():
    """Worked example: 6 drafts are judged together, the first of them against nothing."""
    turns = Turns()
    assert [turns.add("a", 4, 0) for _ in range(4)] == [None] * 4
    assert turns.add("a", 0, 3) is None  # 3 are too few
    assert turns.add("a", 1, 3) == (1, 6)
    assert turns.add("a", 1, 6) is None  # it is another text now, and goes on like that
    turns.forget("a")
    assert turns.add("a", 6, 0) is None


def test_sequences_are_judged_each_by_its_own():
    turns = Turns()
    for _ in range(4):
        assert turns.add("a", 6, 0) is turns.add("b", 0, 6) is None
    assert turns.add("a", 0, 6) == (0, 6)
    assert turns.add("b", 0, 6) is None
