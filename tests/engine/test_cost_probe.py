"""What passes take is measured once, within a budget, and kept; whatever is found on disk, an engine starts."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch

from specpaged.engine import cost_probe, probed_passes
from specpaged.engine.cost_probe import guessed_costs, measured_costs, probe
from specpaged.engine.pass_timer import Shape, sequences
from specpaged.engine.probed_passes import ProbedDrafter, proposal
from specpaged.speculation.pass_seconds import PassShape
from tests.engine.test_engine import make_llm
from tests.heads_world import heads_llm


@pytest.fixture(scope="module")
def pair(toy_pair):
    """The runners of an engine."""
    engine = make_llm(toy_pair, max_model_len=64).engine
    return engine.target, engine.draft


def is_sound(costs):
    assert 0 <= costs.seconds_saved <= 0.5 * costs.target.seconds[0]
    for passes in (costs.target, costs.draft):
        assert passes.num_rows == sorted(set(passes.num_rows))
        assert passes.seconds[0] > 0
        assert passes.seconds == sorted(passes.seconds)
        assert passes.of(PassShape(50, 10, 30)) >= passes.of(PassShape(1, 1, 0))


@pytest.mark.parametrize("most_rows", [1, 40, 600])
def test_more_rows_never_take_less(pair, most_rows):
    costs = probe(*pair, most_rows, budget=0.5)
    is_sound(costs)
    assert costs.target.num_rows[-1] <= max(8, most_rows)


def test_what_it_takes_to_catch_up_is_measured_where_there_is_time(pair, monkeypatch):
    told = []
    monkeypatch.setattr(cost_probe, "_SPARE", 0.0)
    monkeypatch.setattr(cost_probe, "row_behind", lambda drafter, num_rows, left: told.append(num_rows) or 0.125)
    assert probe(*pair, 40, budget=0.5).drafting.per_row_behind == 0.125
    assert told == [60], "what a sequence has room for, and a proposal's drafts"
    costs = probe(*pair, 40, budget=0.0)
    assert len(told) == 1
    low, high = costs.draft.seconds[-2:]
    assert costs.drafting.per_row_behind == pytest.approx(max((high - low) / 7, 0.1 * high / 8))


def test_a_row_behind_takes_what_a_proposal_takes_longer(pair, monkeypatch):
    seconds, timed = {1: 1.0, 61: 13.0}, []

    def propose(drafter, rows, num_drafts):
        timed.append(len(rows[0].token_ids))
        return seconds[timed[-1]]

    monkeypatch.setattr(probed_passes, "proposal", propose)
    drafter = ProbedDrafter(pair[1], pair[0])
    for time_left, num_times in ((1.0, 5), (0.0, 1)):
        timed.clear()
        assert probed_passes.row_behind(drafter, 61, lambda of=time_left: of) == pytest.approx(0.2)
        assert timed == [61, 1] * num_times
    assert probed_passes.row_behind(drafter, 1, lambda: 1.0) is None


def test_without_time_two_row_counts_are_measured(pair):
    costs = probe(*pair, 600, budget=0.0)
    is_sound(costs)
    assert costs.target.num_rows == [1, 8]


def test_of_a_model_whose_passes_take_long_the_others_are_guessed(pair, monkeypatch, tmp_path):
    """And nothing is kept: the next time the machine may be another."""
    monkeypatch.setenv("SPECPAGED_CACHE", str(tmp_path))
    monkeypatch.setattr(cost_probe, "LONGEST", 0.0)
    assert measured_costs(*pair, 40).as_dict() == guessed_costs(*pair).as_dict()
    assert not list(tmp_path.glob("costs-*"))


def test_where_graphs_are_captured_no_proposal_is_timed_in_which_that_is_done(pair):
    target, draft = pair
    drafter, calls = ProbedDrafter(draft, target), []
    drafter.propose = lambda rows, num_drafts: calls.append(num_drafts)
    for drafter.captures in (False, True):
        proposal(drafter, sequences(draft, Shape(1, 1)), 3)
        assert calls == ([3, 3] if drafter.captures else [3])
        calls.clear()


@pytest.mark.parametrize("method", ["eagle3", "clover"])
def test_what_heads_take_to_follow_is_measured_apart(target, heads, method):
    engine = heads_llm(target, method, heads[method]).engine
    for costs in (probe(engine.target, engine.draft, 40, budget=0.5), guessed_costs(engine.target, engine.draft)):
        is_sound(costs)
        assert 0 < costs.following.seconds[0] <= costs.following.seconds[-1]
        assert 0 <= costs.first_share <= 1


def test_prompt_lookup_has_no_passes(pair):
    assert probe(pair[0], None, 20, budget=0.1).draft is None
    assert guessed_costs(pair[0], None).draft is None


def test_the_interpreter_is_not_measured(pair, monkeypatch):
    monkeypatch.setattr(pair[0].model, "backend", "triton")
    monkeypatch.setattr(cost_probe, "probe", None)
    is_sound(measured_costs(*pair, 20))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        {"target": None},
        {"draft": None},
        {"target": [[1], [2]]},
        {"target": [[1, 8], [math.nan, 1.0]]},
        {"target": [[1, 8], [1.0, 1.0], math.inf]},
        {"seconds_per_proposal": -1},
        {"seconds_per_step": math.nan},
        {"seconds_per_sequence": None},
    ],
)
def test_what_is_kept_and_cannot_be_read_is_measured_anew(pair, tmp_path, monkeypatch, content):
    monkeypatch.setenv("SPECPAGED_CACHE", str(tmp_path))
    monkeypatch.setattr(cost_probe, "BUDGET", 0.05)
    measured_costs(*pair, 20)
    (path,) = tmp_path.glob("costs-*.json")
    kept = path.read_text()
    path.write_text(content if isinstance(content, str) else json.dumps(json.loads(kept) | content))
    spoilt = path.read_text()
    is_sound(measured_costs(*pair, 20))
    assert json.loads(path.read_text()).keys() == json.loads(kept).keys()
    assert path.read_text() != spoilt


def test_other_rows_or_threads_are_kept_beside(pair, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECPAGED_CACHE", str(tmp_path))
    monkeypatch.setattr(cost_probe, "BUDGET", 0.05)
    measured_costs(*pair, 20)
    measured_costs(*pair, 30)
    monkeypatch.setattr(cost_probe.torch, "get_num_threads", lambda: 7)
    with pytest.raises(RuntimeError, match="runs with 7"):  # the probe runs what the engine would
        measured_costs(*pair, 30)
    assert len(list(tmp_path.glob("costs-*.json"))) == 2


def test_costs_of_another_build_of_the_kernels_are_not_taken(toy_pair, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECPAGED_CACHE", str(tmp_path))
    monkeypatch.setattr(cost_probe, "BUDGET", 0.05)
    engine = make_llm(toy_pair, max_model_len=64, attention_backend="cpp").engine
    for name in ("library-1.so", "library-1.so", "library-2.so"):
        monkeypatch.setattr(cost_probe.library, "build_name", lambda name=name: name)
        measured_costs(engine.target, engine.draft, 20)
    assert len(list(tmp_path.glob("costs-*.json"))) == 2


def test_what_could_not_be_kept_is_not_left_half_written(pair, tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setenv("SPECPAGED_CACHE", str(tmp_path))
    monkeypatch.setattr(cost_probe, "BUDGET", 0.05)
    monkeypatch.setattr(cost_probe.os, "replace", full)
    is_sound(measured_costs(*pair, 20))
    assert "not kept" in caplog.text
    assert [path for path in tmp_path.iterdir() if path.is_file()] == []


def test_nowhere_to_keep_it_is_no_reason_not_to_start(pair, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECPAGED_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(cost_probe, "BUDGET", 0.05)
    is_sound(measured_costs(*pair, 20))
    assert "not kept" in caplog.text


def test_what_a_pass_of_one_row_saves_in_a_run_of_others_is_told_from_one_behind_a_drafter(monkeypatch):
    """Its first four passes behind a drafter's take longer."""
    num_since = 0

    def forward(*_):
        nonlocal num_since
        num_since += 1
        return 3e-4 if num_since > 4 else 4e-4

    def proposal(*_):
        nonlocal num_since
        num_since = 0
        return 1e-4

    monkeypatch.setattr(probed_passes, "forward", forward)
    monkeypatch.setattr(probed_passes, "proposal", proposal)
    monkeypatch.setattr(probed_passes, "sequences", lambda *_: [])
    target = SimpleNamespace(model=SimpleNamespace(device=torch.device("cpu")))
    drafter, saved = SimpleNamespace(runner=None), []
    for num_rows in (1, 2, 1):
        rows = [SimpleNamespace(token_ids=[1] * num_rows)]
        assert probed_passes.verified(target, drafter, saved, rows) == 4e-4
    assert saved == pytest.approx([1e-4, 1e-4])
