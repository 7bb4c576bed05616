"""Blocks that are lent are looked at when they come."""

import pytest

from specpaged.paging.block_allocator import IntegrityError
from specpaged.paging.leased_page_table import LeasedPageTable
from specpaged.paging.lent_blocks import LentBlocks


@pytest.mark.parametrize("bad", [0, -1, 9])
def test_a_block_that_is_not_there_is_refused_at_once(bad):
    table = LeasedPageTable(LentBlocks(), num_blocks=8, block_size=4)
    table.lend([3, 8])
    with pytest.raises(ValueError, match=rf"blocks must be in 1\.\.8, got {bad}"):
        table.lend([5, bad])
    assert table.blocks == [3, 8]
    with pytest.raises(ValueError, match=rf"blocks must be in 1\.\.8, got {bad}"):
        table.restart([1, bad], [0])
    assert table.blocks == [3, 8]
    table.check_integrity()


def test_it_settles_at_any_lengths_that_it_has_room_for_and_keeps_its_blocks():
    table = LeasedPageTable(LentBlocks(), num_blocks=8, block_size=4, num_pools=2)
    table.lend([3, 5])
    assert table.settle((7, 4), 8) == 0
    assert (table.blocks, table.context_lens) == ([3, 5], [7, 4])
    table.num_published[1] = 1
    assert table.settle((2, 3)) == 0
    assert (table.blocks, table.context_lens, table.num_published) == ([3, 5], [2, 3], [0, 0])
    for context_lens in ((9, 3), (-1, 3), (2,)):
        with pytest.raises(ValueError, match=r"must be 2 in 0\.\.8"):
            table.settle(context_lens)
    assert table.context_lens == [2, 3]


def test_in_blocks_that_are_lent_to_several_there_is_no_scratch():
    lent = LentBlocks()
    table, mate = (LeasedPageTable(lent, num_blocks=8, block_size=4, num_pools=2) for _ in range(2))
    table.lend([3, 5])
    table.settle((7, 0), 8)
    assert list(table.draft_scratch(4, 0)) == [5]
    assert list(table.draft_scratch(8, 0)) == [3, 5]
    mate.restart([3], [4, 0])  # it has found the first one in the cache
    assert list(table.draft_scratch(4, 0)) == [5]
    assert list(table.draft_scratch(8, 0)) == []
    lent.check_integrity([table.blocks, mate.blocks])
    with pytest.raises(IntegrityError, match="counted as"):
        lent.check_integrity([table.blocks])
    mate.restart([6], [4, 0])
    assert list(table.draft_scratch(8, 0)) == [3, 5]
    lent.leave(mate.blocks)  # it has ended
    lent.check_integrity([table.blocks])
