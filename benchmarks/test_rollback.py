"""What rolling back one round costs, by method, B, context and accepted pattern: time, and KV written by copying."""

import time

import pytest

from specpaged.studies import rollback
from specpaged.studies.kv_shape import KVShape
from specpaged.studies.rollback import BATCH_SIZES, CONTEXTS, PATTERNS
from specpaged.studies.rollback_round import Cell, Round, num_rounds

METHODS = rollback.available_rollbacks("cpu")


@pytest.fixture(scope="module")
def matrix(pytestconfig, results):
    """Rows, which the end of the run prints; "truncate" comes first in each field."""
    shape = KVShape.parse(pytestconfig.getoption("--kv-shape"))
    return results.setdefault("rollback", {"kv_shape": shape, "rows": []})


@pytest.mark.parametrize("method", ["truncate", *(name for name in METHODS if name != "truncate")])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("batch_size", BATCH_SIZES, ids="B{}".format)
@pytest.mark.parametrize("context", CONTEXTS, ids="ctx{}".format)
def test_rollback(benchmark, matrix, context, batch_size, pattern, method):
    benchmark.group = f"context {context}, B {batch_size}, {pattern} runs accepted"
    cell = Cell(method, batch_size, context, pattern)
    played = Round(cell, matrix["kv_shape"])
    played.prepare()
    start = time.perf_counter()
    played.roll_back()
    rounds = num_rounds(time.perf_counter() - start)
    copied = benchmark.pedantic(played.roll_back, setup=played.prepare, rounds=rounds, warmup_rounds=1)
    if benchmark.stats is None:  # --benchmark-disable
        return
    matrix["rows"].append(rollback.row_of(cell, played, benchmark.stats.stats.data, copied))
    if method == "truncate":
        assert copied.rollback == copied.gather == copied.other == 0
