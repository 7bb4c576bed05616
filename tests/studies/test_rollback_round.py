"""A round that is rolled back time and again: its bytes, its blocks."""

import pytest

from specpaged.config import ROLLBACKS
from specpaged.studies.kv_shape import KVShape
from specpaged.studies.rollback import PATTERNS
from specpaged.studies.rollback_round import EQUAL, Cell, Round

SHAPE = KVShape(num_layers=4, num_kv_heads=2, head_dim=8)
CONTEXT, B = 40, 7


def played(rollback, pattern, batch_size=B):
    """A round that was rolled back twice, and the bytes of the second time."""
    a_round = Round(Cell(rollback, batch_size, CONTEXT, pattern), SHAPE)
    for _ in range(2):
        a_round.prepare()
        copied = a_round.roll_back()
    return a_round, copied


@pytest.mark.parametrize("batch_size", [1, B])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("rollback", ROLLBACKS)
def test_a_round_copies_what_its_method_says_and_can_be_repeated(rollback, pattern, batch_size):
    a_round, copied = played(rollback, pattern, batch_size)
    gained = a_round.cell.num_gained
    before = CONTEXT - EQUAL
    assert [sequence.page_table.context_lens for sequence in a_round.sequences] == [[before + n] for n in gained]
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
    assert (copied.rollback, copied.gather, copied.other) == expected[rollback]
    assert copied.total == sum(expected[rollback])


def test_the_allocator_works_in_both_patterns():
    for pattern in PATTERNS:
        a_round = Round(Cell("truncate", 4, 48, pattern), SHAPE)
        a_round.prepare()
        held = a_round.allocator.num_held
        a_round.roll_back()
        assert a_round.allocator.num_held < held
