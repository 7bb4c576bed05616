"""Blocks that are lent are looked at when they come."""

import pytest

from specpaged.paging.leased_page_table import LeasedPageTable


@pytest.mark.parametrize("bad", [0, -1, 9])
def test_a_block_that_is_not_there_is_refused_at_once(bad):
    table = LeasedPageTable(num_blocks=8, block_size=4)
    table.lend([3, 8])
    with pytest.raises(ValueError, match=rf"blocks must be in 1\.\.8, got {bad}"):
        table.lend([5, bad])
    assert table.blocks == [3, 8]
    with pytest.raises(ValueError, match=rf"blocks must be in 1\.\.8, got {bad}"):
        table.restart([1, bad], [0])
    assert table.blocks == [3, 8]
    table.check_integrity()
