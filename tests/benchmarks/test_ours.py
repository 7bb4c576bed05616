"""What contenders that take turns are told of one another."""

from __future__ import annotations

import time
from types import SimpleNamespace

from benchmarks import ours as of_ours
from benchmarks.adaptive import pairs
from benchmarks.ours import Ours, Stint
from specpaged.engine import step_clock
from specpaged.testing import synthetic_pair

AWAY = 1000.0  # seconds
ONE_ROUND = {"num_scheduler_steps": 1}  # a step


def test_what_others_do_in_their_turns_is_no_part_of_an_engines_steps(tmp_path, monkeypatch):
    """Its clock jumps between two turns, which are as short as they may be, and never within one."""
    shape = pairs._shape(64, 1, 1) | {"intermediate_size": 32}
    pair = synthetic_pair(shape, shape, directory=tmp_path, acceptance=0.5, dtype="float32")
    ours = Ours("auto", "exact", 40, pair.target, model=pair.draft, num_speculative_tokens="auto", engine=ONE_ROUND)
    away, rests = [0.0], []
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + sum(away))
    monkeypatch.setattr(step_clock, "time", clock)
    monkeypatch.setattr(of_ours, "TURN_SECONDS", 0.0)
    controller = ours.llm.engine.speculative_step.planner.controller
    monkeypatch.setattr(controller, "observe_rest", lambda seconds, *_: rests.append(seconds))
    monkeypatch.setattr(controller, "observe_proposal", lambda *arguments: rests.append(arguments[3]))
    stint = Stint(ours, pairs._random_prompts(6, halves=False), 2)
    while not stint.is_done:
        stint.go_on(of_ours.TURN_SECONDS)
        away.append(AWAY)
    assert len(away) > 3
    assert len(rests) > 10
    assert max(rests) < AWAY
