"""The state of EQSPEC: rows of one batch, realigned after every round."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specpaged.paging.block_allocator import IntegrityError
from specpaged.paging.page_table import TARGET
from specpaged.research.alignment import aligned_length
from tests.research.world import MAX_MODEL_LEN, K, World

ROLLBACKS = pytest.mark.parametrize("rollback", ["repad", "gather", "compact", "batch_min"])
PAD = "."


def padded(names, length):
    """The slow way: a row as a list of its columns, PAD up to where its tokens begin."""
    return [PAD] * (length - len(names)) + names


def test_the_worked_example_of_the_docstring():
    assert aligned_length([0, 2, 0], [11, 9, 15], 100) == 15
    assert [15 - start - length for start, length in zip([0, 2, 0], [11, 9, 15], strict=True)] == [4, 4, 0]


def test_the_papers_example():
    """c = 10, 10, 10 and a = 1, 1, 5: offsets 4, 4, 0."""
    world = World("repad", 3)
    lines = [world.add(11) for _ in range(3)]  # the last token, the bonus, has no KV
    world.play(dict.fromkeys(lines, 0))
    world.realign()
    starts = [line.page_table.start for line in lines]
    world.play({lines[0]: 0, lines[1]: 0, lines[2]: 4})
    world.realign()
    assert [line.page_table.start - start for line, start in zip(lines, starts, strict=True)] == [4, 4, 0]


@ROLLBACKS
@settings(max_examples=25)
@given(data=st.data())
def test_a_fixed_batch_obeys_i1_and_i2_and_moves_who_must(rollback, data):
    """Against rows that are taken apart and padded anew, column by column."""
    batch_size = data.draw(st.integers(1, 4))
    world = World(rollback, batch_size)
    lines = [world.add(data.draw(st.integers(1, 12))) for _ in range(batch_size)]
    rows = {
        line: padded([(line.name, j) for j in range(line.num_tokens)], max(x.num_tokens for x in lines))
        for line in lines
    }
    for _ in range(data.draw(st.integers(1, 6))):
        accepted = {line: data.draw(st.integers(0, K)) for line in lines}
        known = {line: line.num_tokens for line in lines}
        contexts = {line: line.page_table.context_lens[TARGET] for line in lines}
        before, copied = len(rows[lines[0]]), world.kv_layout.copied.rollback
        world.play(accepted)
        expected_bytes = 0
        for line in lines:  # append, unpad, repad
            gained = known[line] + accepted[line] - contexts[line]
            if contexts[line]:
                rows[line] = rows[line] + [(line.name, contexts[line] + j) for j in range(gained)]
            else:
                rows[line] = rows[line] + [(line.name, known[line] + j) for j in range(accepted[line])]
        unpadded = {line: [name for name in row if name != PAD] for line, row in rows.items()}
        after = max(map(len, unpadded.values()))
        for line in lines:
            moves = rows[line] != padded(unpadded[line], after)
            grown = len(rows[line]) - before  # a_i, but in the round of its prefill, which is aligned beforehand
            assert moves == (grown != after - before)
            expected_bytes += moves * world.kept_bytes(line) * (1 if rollback == "compact" else 2)
            rows[line] = padded(unpadded[line], after)
        world.realign()
        for line in lines:
            table = line.page_table
            assert table.start == rows[line].count(PAD)
            assert table.start + table.context_lens[TARGET] == after  # I1
            assert rows[line][table.start :] == [(line.name, j) for j in range(table.context_lens[TARGET])]  # I2
        assert world.kv_layout.copied.rollback - copied == expected_bytes
    assert world.kv_layout.copied.gather == world.kv_layout.copied.other == 0


@pytest.mark.parametrize("rollback", ["repad", "gather", "compact"])
@pytest.mark.parametrize("seed", range(4))
def test_rows_come_and_go_and_stay_aligned(rollback, seed):
    rng = random.Random(seed)
    world = World(rollback, 3)
    for _ in range(40):
        while len(world.lines) < 3 and rng.random() < 0.7:
            world.add(rng.randint(1, 20))
        if not world.lines:
            continue
        world.play({line: rng.randint(0, K) for line in world.lines})
        for line in list(world.lines):
            if line.num_tokens + K >= MAX_MODEL_LEN or rng.random() < 0.1:
                world.remove(line)
        world.realign()
        assert world.kv_layout.length < MAX_MODEL_LEN
    while world.lines:
        world.remove(world.lines[0])
    world.realign()
    assert world.allocator.num_held == 0


def test_nothing_moves_where_all_gain_the_same_and_alone_nobody_moves():
    for lengths, accepted in (([7, 3], [(2, 2), (0, 0), (4, 4)]), ([9], [(0,), (4,), (1,)])):
        world = World("repad", len(lengths))
        lines = [world.add(length) for length in lengths]
        for of_round in accepted:
            world.play(dict(zip(lines, of_round, strict=True)))
            world.realign()
        assert world.kv_layout.copied.rollback == 0


def test_a_row_that_joins_in_the_middle_is_placed_where_it_need_not_move():
    world = World("repad", 3)
    world.play({world.add(9): 0, world.add(4): 0})
    world.realign()
    world.add(6)
    world.play(dict.fromkeys(world.lines, 2))
    world.realign()
    assert world.kv_layout.copied.total == 0


def test_the_others_stay_where_they_are_when_the_longest_row_leaves():
    world = World("repad", 3)
    longest, *others = [world.add(length) for length in (20, 6, 5)]
    world.play(dict.fromkeys(world.lines, 1))
    world.realign()
    world.remove(longest)
    for _ in range(3):
        world.play(dict.fromkeys(others, 2))
        world.realign()
    assert world.kv_layout.copied.rollback == 0


def test_a_row_that_is_not_where_the_batch_ends_is_found():
    world = World("gather", 2)
    first, second = world.add(5), world.add(7)
    world.play({first: 1, second: 1})
    world.realign()
    first.page_table.start += 1
    with pytest.raises(IntegrityError, match="allowed: an end at 8"):
        world.kv_layout.check_integrity()
    first.page_table.start -= 1
    second.page_table.row = first.page_table.row
    with pytest.raises(IntegrityError, match="not distinct"):
        world.kv_layout.check_integrity()


def test_a_row_has_a_width():
    table = World("repad", 1).add(1).page_table
    with pytest.raises(
        ValueError, match=f"at most {MAX_MODEL_LEN + K}, the width of a row, got {MAX_MODEL_LEN + K + 1}"
    ):
        table.reserve(MAX_MODEL_LEN + K + 1)
    assert table.blocks == []
