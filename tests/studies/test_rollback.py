"""The rollback matrix: what it says of a cell, its scale, its ratios."""

import pytest

from specpaged.studies import rollback, rollback_round
from specpaged.studies.rollback_round import Cell
from tests.studies.test_rollback_round import CONTEXT, SHAPE, B, played


def test_what_is_too_large_runs_with_fewer_layers_and_says_so(monkeypatch):
    whole = rollback.row_of(Cell("repad", B, CONTEXT, "ragged"), *_timed("repad"))
    columns = CONTEXT + 2 * (rollback_round.NUM_DRAFTS + 1)
    monkeypatch.setattr(rollback_round, "MAX_BYTES", B * columns * SHAPE.bytes_per_token * 3 // 4)
    row = rollback.row_of(Cell("repad", B, CONTEXT, "ragged"), *_timed("repad"))
    assert whole["scaled"] is None
    assert row["scaled"] == "3, scaled"
    assert row["rollback_mib"] == pytest.approx(whole["rollback_mib"])
    assert row["us"] == pytest.approx(40.0)  # 30 us of three layers
    nothing = rollback.row_of(Cell("repad", B, CONTEXT, "equal"), *_timed("repad", "equal"))
    assert nothing["us"] == pytest.approx(30.0)


def _timed(method, pattern="ragged"):
    a_round, copied = played(method, pattern)
    return a_round, [30e-6], copied


def test_ratios_are_to_truncate_in_the_same_field():
    rows = [
        {"arm": method, "B": size, "context": 1, "pattern": "equal", "us": us}
        for method, size, us in (("truncate", 1, 2.0), ("repad", 1, 8.0), ("truncate", 2, 5.0), ("repad", 2, 50.0))
    ]
    assert [row["over_truncate"] for row in rollback.with_ratios(rows)] == [1, 4, 1, 10]
