"""The rollback matrix: its rounds, its bytes, its scale."""

import pytest

from specpaged.config import ROLLBACKS
from specpaged.studies import rollback
from specpaged.studies.rollback import Cell, KVShape, Round

SHAPE = KVShape(num_layers=4, num_kv_heads=2, head_dim=8)
CONTEXT, B = 40, 7


def played(arm, pattern, batch_size=B):
    """A round that was rolled back twice, and the bytes of the second time."""
    a_round = Round(Cell(arm, batch_size, CONTEXT, pattern), SHAPE)
    for _ in range(2):
        a_round.prepare()
        copied = a_round.roll_back()
    return a_round, copied


@pytest.mark.parametrize("batch_size", [1, B])
@pytest.mark.parametrize("pattern", rollback.PATTERNS)
@pytest.mark.parametrize("arm", ROLLBACKS)
def test_a_round_copies_what_its_arm_says_and_can_be_repeated(arm, pattern, batch_size):
    a_round, copied = played(arm, pattern, batch_size)
    gained = a_round.cell.num_gained
    before = CONTEXT - rollback.EQUAL
    assert [line.page_table.context_lens for line in a_round.lines] == [[before + n] for n in gained]
    moved = sum(before + n for n in gained if n != max(gained)) * SHAPE.bytes_per_token
    own = sum(gained) * SHAPE.bytes_per_token
    expected = {
        "truncate": (0, 0, 0),
        "repad": (2 * moved, 0, 0),
        "gather": (2 * moved, 0, 0),
        "compact": (moved, 0, 0),
        "batch_min": (0, 0, 0),
        # Rows that end where the longest does stay in place; all that was gained goes to the caches.
        "group": (0, moved, own),
    }
    assert (copied.rollback, copied.gather, copied.other) == expected[arm]
    assert copied.total == sum(expected[arm])


def test_the_allocator_works_in_both_patterns():
    for pattern in rollback.PATTERNS:
        a_round = Round(Cell("truncate", 4, 48, pattern), SHAPE)
        a_round.prepare()
        held = a_round.allocator.num_held
        a_round.roll_back()
        assert a_round.allocator.num_held < held


def test_what_is_too_large_runs_with_fewer_layers_and_says_so(monkeypatch):
    whole = rollback.row_of(Cell("repad", B, CONTEXT, "ragged"), *_timed("repad"))
    columns = CONTEXT + 2 * (rollback.NUM_DRAFTS + 1)
    monkeypatch.setattr(rollback, "MAX_BYTES", B * columns * SHAPE.bytes_per_token * 3 // 4)
    row = rollback.row_of(Cell("repad", B, CONTEXT, "ragged"), *_timed("repad"))
    assert whole["scaled"] is None
    assert row["scaled"] == "3, scaled"
    assert row["rollback_mib"] == pytest.approx(whole["rollback_mib"])
    assert row["us"] == pytest.approx(40.0)  # 30 us of three layers
    nothing = rollback.row_of(Cell("repad", B, CONTEXT, "equal"), *_timed("repad", "equal"))
    assert nothing["us"] == pytest.approx(30.0)


def _timed(arm, pattern="ragged"):
    a_round, copied = played(arm, pattern)
    return a_round, [30e-6], copied


def test_ratios_are_to_truncate_in_the_same_field():
    rows = [
        {"arm": arm, "B": size, "context": 1, "pattern": "equal", "us": us}
        for arm, size, us in (("truncate", 1, 2.0), ("repad", 1, 8.0), ("truncate", 2, 5.0), ("repad", 2, 50.0))
    ]
    assert [row["over_truncate"] for row in rollback.with_ratios(rows)] == [1, 4, 1, 10]


@pytest.mark.parametrize("text", ["8,4", "8,4,32,float8", "8,0,32", "8,4,x", "8,4,32,float32,1"])
def test_what_is_no_shape_is_refused(text):
    with pytest.raises(ValueError, match=r"--kv-shape='.*' must be L,Hkv,D"):
        KVShape.parse(text)


def test_a_shape_says_what_a_token_takes():
    assert KVShape.parse("8,4,32").bytes_per_token == 8 * 2 * 4 * 32 * 4
    assert KVShape.parse("36,8,128,bfloat16").bytes_per_token == 36 * 2 * 8 * 128 * 2
