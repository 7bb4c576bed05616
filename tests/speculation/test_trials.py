"""Trials: whatever slows everything down, they see what passes with drafts take beside those without."""

from __future__ import annotations

import math
import random

import pytest

from specpaged.speculation.trials import Trials


def run(trials, dearer, num_steps, rng):
    for i in range(num_steps):
        busy = math.log(3.0) if i // 200 % 2 else 0.0
        plain = trials.is_due(1)
        trials.observe(not plain, math.exp(busy + (0.0 if plain else dearer) + rng.gauss(0, 0.05)), 1.0)


@pytest.mark.parametrize("dearer", [-0.3, 0.0, 0.25])
def test_it_finds_how_much_dearer_drafting_is_while_a_neighbour_comes_and_goes(dearer):
    trials = Trials()
    run(trials, dearer, 4000, random.Random(1))
    assert trials.dearer == pytest.approx(dearer, abs=0.1)
    assert trials.factor == math.exp(trials.dearer)


def test_trials_come_soon_and_then_seldom():
    trials = Trials()
    due = [i for i in range(1000) if trials.is_due(1)]
    assert due[0] < 10
    assert len(due) < 25


def test_without_drafts_plain_passes_say_nothing_and_what_was_found_is_forgotten():
    trials = Trials()
    run(trials, 0.3, 1000, random.Random(2))
    found = trials.dearer
    for _ in range(100):
        trials.observe(False, 0.3, 1.0)
    assert abs(trials.dearer - found) < 1.0  # the first few may be of the drafts before
    trials = Trials()
    for _ in range(100):
        trials.observe(False, 0.3, 1.0)
    assert trials.dearer == 0.0
    trials.dearer = 0.4
    for _ in range(200):
        trials.pause()
    assert trials.dearer < 0.01
