"""The device benchmark, on tiny shapes in the interpreter: what it checks is right. Timing needs a GPU."""

from benchmarks.device import loop
from benchmarks.device.__main__ import main, succeeded
from specpaged.config import ROLLBACKS


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
    assert [(cell["B"], cell["K"]) for cell in cells] == 2 * [(1, 0), (1, 2), (3, 0), (3, 2)]
    assert all(cell["acceptance_rate"] > 0.3 for cell in cells if cell["K"])
    assert result["loop"]["pair"].startswith("synthetic: ")
    assert succeeded(result)
    loop.draw(result["loop"], tmp_path / "loop.png")
    assert (tmp_path / "loop.png").stat().st_size > 10_000
    result["loop"]["identical"]["exact"] = False
    assert not succeeded(result)
    assert capsys.readouterr().out.rstrip().endswith("}")


def test_runs_agree_as_far_as_the_shortest_of_them_came():
    assert loop._agree([[[1, 2, 3], [4]], [[1, 2], [4, 5]]])
    assert not loop._agree([[[1, 2, 3], [4]], [[1, 9], [4, 5]]])
