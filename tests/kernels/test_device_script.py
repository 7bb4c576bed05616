"""The device benchmark, on tiny shapes in the interpreter: what it checks is right. Timing needs a GPU."""

import itertools
from dataclasses import replace

import pytest

from benchmarks.device import loop, tiles
from benchmarks.device.__main__ import main, succeeded
from benchmarks.device.stage_clock import Span
from specpaged.config import ROLLBACKS
from specpaged.metrics import STAGES
from tests.benchmarks.test_stage_clock import FakeDevice
from tests.kernels import references


def test_every_check_passes(capsys):
    result = main(["--smoke"])
    errors = result["kernel_errors"]
    measured = [error for entry in errors["float16"].values() if isinstance(entry, dict) for error in entry.values()]
    assert len(measured) >= 3
    assert max(measured) < 2
    assert errors["float16"]["store_kv"]
    assert errors["float16"]["realign"]
    assert errors["float16"]["lm_head"]
    assert errors["float32"] == {"sample": True, "accept": True, "reject": True}
    assert errors["int32"]["pack"]
    assert {row["arm"] for row in result["rollback"]["rows"]} == set(ROLLBACKS)
    assert result["exactness"] == {"float16": {"attention": True, "linear": True, "rms_norm": True}}
    neighbour = result["attention"][0]["neighbours"]["torch SDPA per sequence"]
    assert neighbour["apart"] < 0.01
    assert succeeded(result)
    result["exactness"]["float16"]["linear"] = False
    assert not succeeded(result)
    assert capsys.readouterr().out.rstrip().endswith("}")


def test_the_loop_decodes_the_same_in_every_way(capsys, tmp_path):
    result = main(["--smoke", "--loop"])
    cells = result["loop"]["cells"]
    of_numerics = [(1, 0), (1, 2), (3, 0), (3, 2), (1, "auto"), (3, "auto")]
    assert [(cell["B"], cell["K"]) for cell in cells] == 2 * of_numerics
    assert all(cell["acceptance_rate"] > 0.3 for cell in cells if cell["K"] == 2)
    assert result["loop"]["pair"].startswith("synthetic: ")
    assert succeeded(result)
    loop.draw(result["loop"], tmp_path / "loop.png")
    assert (tmp_path / "loop.png").stat().st_size > 10_000
    result["loop"]["left_out"] = [{"B": 3}]
    assert not succeeded(result)
    result["loop"] |= {"left_out": [], "identical": {"exact": False}}
    assert not succeeded(result)
    assert capsys.readouterr().out.rstrip().endswith("}")


def test_the_loop_looks_at_rounds_of_the_device(monkeypatch):
    """By a clock that goes on by a second whenever somebody looks, on the kernels' references."""
    references.put_in_place(monkeypatch)
    device, seconds = FakeDevice(), itertools.count()
    spans = []

    def look(run):
        before = len(spans)
        run()
        spans.append((before, before + 1))
        return [Span(*of) for of in ((0.0, 1.0, "_plan_kernel"), (3.0, 4.0, "gemm"), (4.0, 4.0, "_settle_kernel"))]

    scale = replace(
        loop.SMOKE, attention_backend="triton", batch_sizes=(2,), numerics=("exact",), has_rounds=True, seconds=1e9
    )
    result = loop.run(scale, 1e9, loop.Tools(device.event, device.wait, look, lambda: float(next(seconds))))
    cells = {(cell["way"], cell["K"]): cell for cell in result["cells"]}
    assert list(cells) == [(way, k) for ks in ((0, 2), ("auto",)) for way in ("eager", "rounds") for k in ks]
    assert result["identical"] == {"exact": True}
    assert result["left_out"] == []
    assert all(cell["idle_share"] == 0.5 for cell in cells.values())
    assert set(cells["eager", 2]["device_ms"]) == set(STAGES)
    for k in (0, 2):
        cell = cells["rounds", k]
        assert cell["device_ms"] == {"plan": 1e-3, "target": 3e-3, "settle": 0.0}
        # Of the seconds of each step, which begins and ends with a look, two looks are of who waits for the round.
        assert cell["step_ms"]["median"] == 3e3
        assert cell["host_ms"] == 2e3
        assert cell["stage_floor_ms"]["target"] == cell["floor_ms"] > cell["stage_floor_ms"]["draft"] * (k == 0)
        assert "host_ms" not in cells["eager", k]
    assert cells["rounds", 2]["acceptance_rate"] > 0.3


def test_cells_for_which_there_is_no_time_are_named():
    seconds = itertools.count()
    scale = replace(loop.SMOKE, numerics=("exact",), seconds=3.0)
    result = loop.run(scale, None, loop.Tools(clock=lambda: float(next(seconds))))
    names = [(cell["B"], cell["K"]) for cell in result["cells"]]
    assert names == [(1, 0)]
    assert len(result["left_out"]) == 5
    assert result["left_out"][0] == {"B": 1, "numerics": "exact", "way": "eager", "K": 2}


def test_tiles_that_ship_are_among_those_that_are_tried(capsys):
    """And what cannot run is left out, while all others are ordered by what they take."""
    result = main(["--smoke", "--tiles"])
    assert [entry["group"] for entry in result["tiles"]["attention"]] == [2, 2]
    for kind, count in (("attention", 2), ("linear", 1)):
        assert sum("ships" in entry for entry in result["tiles"][kind]) == 1
        assert len(result["tiles"][kind]) == count
    times = {"x": (4.0, 1.0), "y": (None, 1.0), "z": (2.0, 2.0)}
    entries = [{"us": {"a": a, "b": b}, "name": name} for name, (a, b) in times.items()]
    assert [(e["name"], e["over_least"]) for e in tiles._ordered(entries)] == [("x", 1.5), ("z", 1.5)]
    entries[2]["us"] = {"a": 2.0, "b": 1.0}
    assert [(e["name"], e["over_least"]) for e in tiles._ordered(entries)] == [("z", 1.0), ("x", 1.5)]
    assert capsys.readouterr().out.rstrip().endswith("}")


def test_sections_can_be_chosen_and_others_are_refused(capsys):
    assert list(main(["--smoke", "--only", "exactness"])) == ["device", "environment", "exactness"]
    for wrong in (["--only", "exactness,tiles"], ["--loop", "--tiles"]):
        with pytest.raises(SystemExit):
            main(["--smoke", *wrong])
    assert "'exactness,tiles' names other sections; allowed: kernel_errors, exactness" in capsys.readouterr().err


def test_runs_agree_as_far_as_the_shortest_of_them_came():
    assert loop._agree([[[1, 2, 3], [4]], [[1, 2], [4, 5]]])
    assert not loop._agree([[[1, 2, 3], [4]], [[1, 9], [4, 5]]])
