"""What lanes' passes are measured on, and what is shown of the cells."""

import threading
from functools import partial

import pytest
from rich.console import Console

from benchmarks.overlap import lane_passes, show
from benchmarks.overlap.cell import AGAIN, AUTO, OVERLAP, ROUND_BY_ROUND, SEQUENTIAL
from specpaged import SamplingParams
from specpaged.engine.lanes import Lanes
from tests import toys
from tests.engine.test_engine import make_llm

PASSES = {f"{name}_{way}" for name in ("verify", "draft") for way in ("all", "lane", "beside")}


@pytest.fixture
def llm(toy_pair):
    return make_llm(toy_pair, schedule="overlap", max_num_seqs=4, max_model_len=128)


def test_passes_are_timed_alone_and_beside_the_other_lanes(llm, monkeypatch):
    monkeypatch.setattr(lane_passes, "SECONDS", 0.01)
    engine = llm.engine
    found = lane_passes.LanePasses(engine, 4, 3, context=20).measure()
    assert found.keys() == PASSES
    assert all(milliseconds > 0 for milliseconds in found.values())
    engine.check_integrity()
    engine.add_request("0", toys.prompts(1)[0]["prompt_token_ids"], SamplingParams(max_tokens=4))
    with pytest.raises(RuntimeError, match="would be written over"):
        lane_passes.LanePasses(engine, 4, 3, context=20)


def test_a_lane_that_fails_ends_the_other_ones_measurement(llm, monkeypatch):
    monkeypatch.setattr(lane_passes, "SECONDS", 0.01)
    lanes, ended = Lanes(llm.engine.target.model, llm.engine.draft.model), [threading.Event(), threading.Event()]
    verify, draft = partial(lane_passes._timed, int, *ended), partial(lane_passes._timed, [].pop, *reversed(ended))
    with pytest.raises(IndexError):
        lanes.run(verify, draft)


def test_a_line_for_each_cell_and_a_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(show, "Console", lambda **_: Console(width=400))
    cell = {
        "speeds": {SEQUENTIAL: 1.0, ROUND_BY_ROUND: 0.9, OVERLAP: 0.6, AUTO: 0.99, AGAIN: 1.01},
        "verify_ms": 2.0, "draft_ms": 1.0, "rest_ms": 0.1, "model": 0.667, "lanes_alone": 1.2, "lanes_beside": 1.5,
        "passes_ms": dict.fromkeys(PASSES, 1.0), "cost_model": 0.7,
    }  # fmt: skip
    cells = {"embedded; 2": cell, "embedded; 16": cell, "draft 0.4, 0.6; 2": cell | {"cost_model": None}}
    results = {"threads": 2, "k": 4, "cpu": "one of ours", "cells": cells}
    show.print_table(results)
    printed = capsys.readouterr().out
    assert "0.60" in printed
    assert "1.50" in printed  # what was measured: of a round, over one round by round
    assert "3 cells: auto over sequential >= 0.98 in 3, least 0.990" in printed
    path = tmp_path / "overlap.png"
    assert "overlap.png" in show.draw(results, path)
    assert path.stat().st_size > 0
