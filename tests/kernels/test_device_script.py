"""The device benchmark, on tiny shapes in the interpreter: what it checks is right. Timing needs a GPU."""

from benchmarks.device import rollback
from benchmarks.device.__main__ import main, succeeded


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
    assert result["exactness"] == {"float16": {"attention": True, "linear": True, "rms_norm": True}}
    neighbour = result["attention"][0]["neighbours"]["torch SDPA per sequence"]
    assert neighbour["apart"] < 0.01
    assert succeeded(result)
    result["exactness"]["float16"]["linear"] = False
    assert not succeeded(result)
    assert capsys.readouterr().out.rstrip().endswith("}")


def test_truncation_leaves_the_page_tables_as_they_were():
    assert rollback.truncate_seconds(batch_size=3, context_len=40, block_size=16, rounds=2) > 0
