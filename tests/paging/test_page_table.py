from __future__ import annotations

import re

import pytest

from specpaged.paging.block_allocator import BlockAllocator, IntegrityError, OutOfBlocksError
from specpaged.paging.page_table import DRAFT, TARGET, PageTable


def make_table(allocator: BlockAllocator, *context_lens: int, block_size: int = 4) -> PageTable:
    table = PageTable(allocator, block_size, num_pools=len(context_lens))
    table.reserve(max(context_lens))
    for pool, context_len in enumerate(context_lens):
        table.advance(pool, context_len)
    return table


def state(*tables: PageTable):
    allocator = tables[0]._allocator
    refs = [allocator.ref_count(block) for block in range(1, allocator.num_blocks + 1)]
    return refs, allocator.num_free, [(list(t.blocks), list(t.context_lens)) for t in tables]


def test_one_round_of_two_sequences():
    """The worked example of PageTable's docstring. K = 4."""
    allocator = BlockAllocator(6)
    a, b = make_table(allocator, 5, 5), make_table(allocator, 7, 7)
    assert (a.blocks, b.blocks) == ([1, 2], [3, 4])
    # A target |xxxx|x...|            B target |xxxx|xxx.|
    #   draft  |oooo|o...|              draft  |oooo|ooo.|
    a.reserve(10)
    b.reserve(12)
    assert (a.blocks, b.blocks) == ([1, 2, 5], [3, 4, 6])
    a.advance(DRAFT, 4)
    b.advance(DRAFT, 4)
    a.advance(TARGET, 5)
    b.advance(TARGET, 5)
    # A target |xxxx|xxxx|xx..|       B target |xxxx|xxxx|xxxx|
    #   draft  |oooo|oooo|o...|         draft  |oooo|oooo|ooo.|
    assert (a.context_lens, b.context_lens) == ([10, 9], [12, 11])
    assert a.truncate(TARGET, 6 + 1) == 0  # A accepts 1: the draft's d3 still lies in block 5
    assert a.truncate(DRAFT, min(9, 6 + 1)) == 1
    assert b.truncate(TARGET, 8 + 4) == 0  # B accepts 4
    assert b.truncate(DRAFT, min(11, 8 + 4)) == 0
    # A target |xxxx|xxx.|            B target |xxxx|xxxx|xxxx|
    #   draft  |oooo|ooo.|              draft  |oooo|oooo|ooo.|
    assert (a.blocks, a.context_lens) == ([1, 2], [7, 7])
    assert (b.blocks, b.context_lens) == ([3, 4, 6], [12, 11])
    assert allocator.num_free == 1
    child, pairs = a.fork(6)
    # A     [1, 2]  |xxxx|xxx.|
    # child [1, 5]  |xxxx|xx..|
    assert (child.blocks, child.context_lens, pairs) == ([1, 5], [6, 6], [(2, 5)])
    assert [allocator.ref_count(block) for block in (1, 2, 5)] == [2, 1, 1]
    allocator.check_integrity([a.blocks, b.blocks, child.blocks])


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_reserve_takes_the_blocks_that_it_needs_and_no_more(block_size):
    for num_tokens in range(34):
        allocator = BlockAllocator(40)
        table = PageTable(allocator, block_size)
        expected = -(-num_tokens // block_size)
        table.reserve(num_tokens)
        table.reserve(num_tokens)
        assert (len(table.blocks), allocator.num_held) == (expected, expected)
        assert (table.capacity, table.context_lens) == (expected * block_size, [0])


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_truncate_keeps_what_the_kept_tokens_need_and_no_more(block_size):
    for kept in range(34):
        allocator = BlockAllocator(40)
        table = make_table(allocator, 33, block_size=block_size)
        blocks = list(table.blocks)
        expected = -(-kept // block_size)
        assert table.truncate(TARGET, kept) == len(blocks) - expected
        assert table.blocks == blocks[:expected]
        assert (table.context_lens, allocator.num_held) == ([kept], expected)


def test_truncate_to_the_same_length_frees_blocks_reserved_and_not_used():
    allocator = BlockAllocator(4)
    table = make_table(allocator, 4, 4)
    table.reserve(16)
    assert table.truncate(TARGET, 4) == 3
    assert (table.capacity, allocator.num_free) == (4, 3)


def test_reserve_is_all_or_nothing():
    allocator = BlockAllocator(3)
    table, other = make_table(allocator, 4), make_table(allocator, 4)
    before = state(table, other)
    with pytest.raises(OutOfBlocksError, match="12 tokens need 2 more blocks, but only 1 of 3 are free"):
        table.reserve(12)
    assert state(table, other) == before


def test_fork_without_a_block_for_the_copy_changes_nothing():
    allocator = BlockAllocator(2)
    table = make_table(allocator, 6)
    before = state(table)
    with pytest.raises(OutOfBlocksError):
        table.fork(5)
    assert state(table) == before
    child, pairs = table.fork(4)  # a full block needs none
    assert (child.blocks, pairs) == (table.blocks[:1], [])


def test_fork_of_nothing_shares_nothing():
    allocator = BlockAllocator(2)
    child, pairs = make_table(allocator, 6).fork(0)
    assert (child.blocks, child.context_lens, pairs) == ([], [0], [])


def test_parent_and_child_append_to_blocks_of_their_own():
    allocator = BlockAllocator(6)
    parent = make_table(allocator, 6, 6)
    child, pairs = parent.fork(6)
    parent.reserve(9)
    child.reserve(9)
    # parent [1, 2, 4]  |xxxx|xx..|....|
    # child  [1, 3, 5]  |xxxx|xx..|....|
    assert (parent.blocks, child.blocks, pairs) == ([1, 2, 4], [1, 3, 5], [(2, 3)])
    assert parent.free() == 3
    assert (allocator.num_held, allocator.ref_count(1)) == (3, 1)
    assert child.free() == 3
    assert allocator.num_held == 0


def test_appending_into_a_block_with_more_than_one_owner_is_impossible():
    allocator = BlockAllocator(6)
    parent = make_table(allocator, 8, 8)
    child, _ = parent.fork(8)
    child.truncate(TARGET, 7)
    # parent [1, 2]  |xxxx|xxxx|
    # child  [1, 2]  |xxxx|xxx.|   slot 7 is not the child's alone
    child.reserve(7)  # writes nothing
    child.advance(TARGET, 0)
    before = state(parent, child)
    for attempt in (lambda: child.reserve(8), lambda: child.reserve(16), lambda: child.advance(TARGET, 1)):
        with pytest.raises(ValueError, match="block with more than one owner is impossible: block 2 has 2"):
            attempt()
        assert state(parent, child) == before
    parent.free()
    child.reserve(8)  # now it is
    child.advance(TARGET, 1)


def test_the_target_s_context_decides_what_will_be_written_and_a_draft_that_is_behind_may_share():
    allocator = BlockAllocator(6)
    parent = make_table(allocator, 12, 12)
    child, _ = parent.fork(12)
    child.truncate(DRAFT, 6)
    # child  target |xxxx|xxxx|xxxx|
    #        draft  |oooo|oo..|....|   its next pass starts at slot 6, in a shared block
    child.reserve(13)
    child.advance(DRAFT, 7)
    assert child.context_lens == [12, 13]
    child.truncate(TARGET, 11)
    with pytest.raises(ValueError, match="block 3 has 2"):
        child.reserve(12)


def test_free_gives_everything_back_and_the_table_is_usable_again():
    allocator = BlockAllocator(3)
    table = make_table(allocator, 9, 5)
    assert table.free() == 3
    assert (table.blocks, table.context_lens, allocator.num_free) == ([], [0, 0], 3)
    assert table.free() == 0
    table.reserve(12)
    table.advance(DRAFT, 12)
    table.check_integrity()


def test_adopted_blocks_are_valid_as_far_as_is_said_and_a_draft_catches_up_in_them():
    allocator = BlockAllocator(4)
    owner = make_table(allocator, 8, 8)
    for block in owner.blocks:
        allocator.share(block)
    table = PageTable(allocator, 4, num_pools=2)
    table.adopt(owner.blocks, [8, 4])
    assert (table.blocks, table.context_lens) == ([1, 2], [8, 4])
    table.reserve(9)
    table.advance(DRAFT, 4)  # which the owner has computed, too, or will
    table.truncate(TARGET, 6)
    table.truncate(DRAFT, 6)
    with pytest.raises(ValueError, match="more than one owner"):
        table.advance(DRAFT, 1)  # a token that is not the owner's, perhaps
    assert owner.blocks == [1, 2]
    allocator.check_integrity([owner.blocks, table.blocks])
    with pytest.raises(ValueError, match="only an empty page table can adopt blocks; this one has 2"):
        table.adopt([], [0, 0])


@pytest.mark.parametrize(
    ("blocks", "context_lens"), [([1], [3, 3]), ([1], [8, 4]), ([], [4, 0]), ([1], [4, 5]), ([1], [4, -1]), ([1], [4])]
)
def test_adopted_blocks_are_full(blocks, context_lens):
    allocator = BlockAllocator(4)
    allocator.allocate()
    expected = f"context_lens must be 2 of at most {4 * len(blocks)} .*, got {re.escape(str(context_lens))}"
    with pytest.raises(ValueError, match=expected):
        PageTable(allocator, 4, num_pools=2).adopt(blocks, context_lens)


def test_an_unallocated_block_cannot_be_adopted():
    with pytest.raises(ValueError, match="block 2 has none"):
        PageTable(BlockAllocator(4), 4).adopt([2], [4])


@pytest.mark.parametrize(
    ("attempt", "sentence"),
    [
        (lambda t: t.truncate(TARGET, 7), "num_tokens must be in 0..6, the context of pool 0, got 7"),
        (lambda t: t.truncate(DRAFT, 6), "num_tokens must be in 0..5, the context of pool 1, got 6"),
        (lambda t: t.truncate(TARGET, -1), "num_tokens must be in 0..6, the context of pool 0, got -1"),
        (lambda t: t.truncate(2, 0), "pool must be in 0..1, got 2"),
        (lambda t: t.truncate(-1, 0), "pool must be in 0..1, got -1"),
        (lambda t: t.advance(TARGET, 3), "num_tokens must be in 0..2, the capacity left, got 3"),
        (lambda t: t.advance(DRAFT, 4), "num_tokens must be in 0..3, the capacity left, got 4"),
        (lambda t: t.advance(TARGET, -1), "num_tokens must be in 0..2, the capacity left, got -1"),
        (lambda t: t.advance(-1, 0), "pool must be in 0..1, got -1"),
        (lambda t: t.fork(7), "num_tokens must be in 0..6, the target's context, got 7"),
        (lambda t: t.fork(-1), "num_tokens must be in 0..6, the target's context, got -1"),
        (lambda t: t.reserve(-1), "num_tokens must be >= 0, got -1"),
    ],
)
def test_a_bad_argument_is_named_and_changes_nothing(attempt, sentence):
    table = make_table(BlockAllocator(4), 6, 5)
    before = state(table)
    with pytest.raises(ValueError, match=sentence):
        attempt(table)
    assert state(table) == before
    table.check_integrity()


@pytest.mark.parametrize("name", ["block_size", "num_pools"])
@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_sizes_are_positive(name, value):
    sizes = {"block_size": 4, "num_pools": 2, name: value}
    with pytest.raises(ValueError, match=f"{name} must be an int >= 1, got {value}"):
        PageTable(BlockAllocator(1), **sizes)


@pytest.mark.parametrize(
    ("break_it", "sentence"),
    [
        (lambda t: t.blocks.append(t.blocks[0]), "a block twice"),
        (lambda t: t.blocks.append(0), "does not exist"),
        (lambda t: t.blocks.append(4), "no owner"),
        (lambda t: t.context_lens.__setitem__(DRAFT, 9), "pool 1 has 9 valid tokens, capacity 8"),
        (lambda t: t.num_published.__setitem__(DRAFT, 2), "pool 1 has 2 blocks published, but 5 valid tokens"),
    ],
)
def test_check_integrity_finds_a_broken_table(break_it, sentence):
    table = make_table(BlockAllocator(4), 6, 5)
    table.check_integrity()
    break_it(table)
    with pytest.raises(IntegrityError, match=sentence):
        table.check_integrity()


@pytest.mark.parametrize("target", [0, 3, 6, 8, 11])
@pytest.mark.parametrize("draft", [0, 4, 7, 12])
def test_settling_is_to_advance_or_to_truncate_each_pool(target, draft):
    tables = []
    for settles in (True, False):
        table = make_table(BlockAllocator(9), 6, 5)
        table.reserve(16)
        table.num_published, table.published_tails = [1, 1], [object(), object()]
        if settles:
            num_freed = table.settle((target, draft))
        else:
            table.advance(TARGET, max(0, target - 6))
            table.advance(DRAFT, max(0, draft - 5))
            num_freed = table.truncate(TARGET, target) + table.truncate(DRAFT, draft)
        tables.append((num_freed, state(table), table.num_published, [tail is None for tail in table.published_tails]))
    assert tables[0] == tables[1]


def test_settling_keeps_slots_for_drafts_that_wait():
    table = make_table(BlockAllocator(9), 6, 5)
    table.reserve(16)
    assert table.settle((7, 8), 9) == 1
    assert len(table.blocks) == 3
    assert table.settle((7, 7), 8) == 1
    assert len(table.blocks) == 2


def test_settling_refuses_what_cannot_be_and_leaves_everything_as_it_was():
    allocator = BlockAllocator(9)
    table = make_table(allocator, 6, 5)
    before = state(table)
    for context_lens in [(9, 5), (6, 9), (-1, 5), (6,), (6, 5, 5)]:
        with pytest.raises(ValueError, match="context_lens must be"):
            table.settle(context_lens)
    allocator.share(table.blocks[1])
    with pytest.raises(ValueError, match="more than one owner"):
        table.settle((7, 5))
    allocator.free(table.blocks[1])
    assert state(table) == before


def test_a_cached_block_that_tokens_settle_in_stops_being_cached():
    allocator = BlockAllocator(9)
    table = make_table(allocator, 6)
    allocator.mark_cached(table.blocks[0])
    allocator.mark_cached(table.blocks[1])
    table.settle((7,))
    assert [allocator.is_cached(block) for block in table.blocks] == [True, False]


def test_scratch_is_where_the_draft_holds_nothing_behind_adopted_blocks_and_nobody_else_is():
    """The worked example of draft_scratch's docstring."""
    allocator = BlockAllocator(8)
    table = make_table(allocator, 14, 2)
    # target  |xxxx|xxxx|xxxx|xx..|
    # draft   |oo..|....|ssss|ss..|
    assert list(table.draft_scratch(6, 3)) == table.blocks[2:]
    assert list(table.draft_scratch(9, 3)) == table.blocks[1:]
    assert list(table.draft_scratch(13, 3)) == []  # the first block holds some of the draft's
    assert list(table.draft_scratch(9, 5)) == []  # the second one may be cached
    table.advance(DRAFT, 5)
    assert list(table.draft_scratch(9, 3)) == []
    assert list(table.draft_scratch(6, 3)) == table.blocks[2:]
    child, _ = table.fork(12)
    assert list(table.draft_scratch(4, 3)) == table.blocks[3:]
    assert list(child.draft_scratch(4, 3)) == []  # its last block is its parent's, too
