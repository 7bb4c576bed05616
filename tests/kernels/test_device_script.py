"""The device benchmark, on tiny shapes in the interpreter: what it checks is right, and each of its parts runs."""

from benchmarks.device import rollback
from benchmarks.device.__main__ import main


def test_every_check_passes(capsys):
    result = main(["--smoke"])
    errors = result["kernel_errors"]
    assert all(entry["error_in_eps"] < 2 for entry in errors["float16"].values() if isinstance(entry, dict))
    assert errors["float16"]["store_kv"]
    assert errors["float16"]["realign"]
    assert errors["float32"]["accept"]
    assert errors["int32"]["pack"]
    assert result["exactness"] == {"float16": {"attention": True, "linear": True, "rms_norm": True}}
    neighbour = result["attention"][0]["neighbours"]["torch SDPA per sequence"]
    assert neighbour["apart"] < 0.01
    assert capsys.readouterr().out.rstrip().endswith("}")


def test_truncation_leaves_the_page_tables_as_they_were():
    assert rollback.truncate_seconds(batch_size=3, context_len=40, block_size=16, rounds=2) > 0
