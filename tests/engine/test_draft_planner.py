"""How often a controller hears what steps take."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from specpaged.drafting.draft import NO_DRAFT
from specpaged.engine import draft_planner
from specpaged.engine.draft_planner import DraftPlanner
from specpaged.speculation.controller import Plan


class Listener:
    """A controller that counts what it hears."""

    def __init__(self):
        self.num_heard = 0

    def observe_target(self, shape, seconds):
        self.num_heard += 1

    def observe_rest(self, seconds, num_seqs):
        pass


@pytest.mark.parametrize(("seconds", "share"), [(1e-5, 1 / 64), (2.1e-3, 1 / 39), (1.1e-2, 1 / 8), (1e-1, 1)])
def test_of_long_steps_more_are_heard_as_long_as_it_takes_little_of_the_time(monkeypatch, seconds, share):
    now = 0.0
    monkeypatch.setattr(draft_planner, "time", SimpleNamespace(perf_counter=lambda: now))
    listener = Listener()
    planner = DraftPlanner(listener)
    entries = [SimpleNamespace(num_new_tokens=1, draft=NO_DRAFT, context_len=10)]

    def run(num_steps):
        nonlocal now
        before = listener.num_heard
        for _ in range(num_steps):
            planner.begin()
            now += seconds
            if planner.tells:
                planner.scored(entries)
        return listener.num_heard - before

    assert run(63) == 63
    assert run(2080) == pytest.approx(2080 * share, rel=0.02)


def test_of_a_trial_all_steps_are_heard_but_the_first_and_none_for_it_behind_it():
    listener = Listener()
    planner = DraftPlanner(listener)
    planner._num_steps = planner._told_next = 1 << 20
    planner._told_next += 1000  # nothing is due
    listener.plan = lambda candidates, num_steps: Plan([], num_steps=4, is_trial=True)
    told = []
    for step in range(8):
        if step == 4:
            listener.plan = lambda candidates, num_steps: Plan([], num_steps=4)
        planner.plan([])
        planner.begin()
        told.append(planner.tells)
        planner.tells = False
    assert told == [False, True, True, True, False, False, False, False]
