"""A draft with blocks of its own: whatever it gives up, the KV that counts as valid is that of the text it reads."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specpaged.paging.block_allocator import BlockAllocator
from specpaged.paging.page_table import DRAFT, TARGET
from specpaged.paging.split_page_table import NUM_SINK_TOKENS, SplitPageTable


def make_table(num_draft_blocks=40, block_size=4, window=None, num_blocks=200) -> SplitPageTable:
    allocators = BlockAllocator(num_blocks), BlockAllocator(num_draft_blocks)
    return SplitPageTable(*allocators, block_size, window)


class World:
    """A sequence, and a draft pool of which each slot holds the text that its KV was computed from."""

    def __init__(self, table: SplitPageTable, num_prompt_tokens: int):
        self.table = table
        self.token_ids = list(range(num_prompt_tokens))
        self.slots: dict[int, tuple[int, ...]] = {}

    @property
    def text(self) -> list[int]:
        skipped = self.table.num_skipped
        return self.token_ids if not skipped else self.token_ids[:NUM_SINK_TOKENS] + self.token_ids[4 + skipped :]

    def slot(self, place: int) -> int:
        size = self.table.block_size
        return self.table.draft_entries[place // size] * size + place % size

    def round(self, num_drafts: int, num_accepted: int) -> int | None:
        """The draft catches up and drafts as many as there is room for; some stand, one token comes behind them."""
        table, known = self.table, len(self.token_ids)
        lag, skipped = table.draft_lag(known), table.num_skipped
        room = table.reserve_draft(known, num_drafts)
        drafts = [10_000 + i for i in range(room or 0)]  # no sequence's own tokens
        if room:
            run = table.draft_text(self.token_ids, known)
            if table.num_skipped == skipped:  # else it has slid a little early, for room behind it
                assert len(run) == lag
            read = [*self.text, *drafts[:-1]]
            for place in range(table.draft_position, len(read)):
                self.slots[self.slot(place)] = tuple(read[: place + 1])
            table.advance(DRAFT, len(run) + len(drafts) - 1)
        stand = drafts[: min(num_accepted, len(drafts))]
        self.token_ids += [*stand, known + 100_000]
        table.reserve(len(self.token_ids))
        table.advance(TARGET, known + len(stand) - table.context_lens[TARGET])
        table.truncate(DRAFT, min(table.context_lens[DRAFT], known + len(stand)))
        return room

    def check(self) -> None:
        self.table.check_integrity()
        text = self.text
        for place in range(self.table.draft_position):
            assert self.slots[self.slot(place)] == tuple(text[: place + 1])


@settings(max_examples=40)
@given(
    num_prompt_tokens=st.integers(1, 200),
    window=st.sampled_from([None, 64, 80, 128]),
    block_size=st.sampled_from([1, 4, 16]),
    rounds=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=40),
)
def test_kv_is_that_of_the_text_that_the_draft_reads(num_prompt_tokens, window, block_size, rounds):
    table = make_table(600, block_size, window, num_blocks=700)
    world = World(table, num_prompt_tokens)
    table.reserve(num_prompt_tokens)
    for num_drafts, num_accepted in rounds:
        room = world.round(num_drafts, num_accepted)
        assert room is not None
        assert room >= min(num_drafts, 1)
        world.check()
        if window is not None:
            assert len(table.draft_entries) <= -(-window // block_size)
    table.free()
    assert table.draft.capacity == table.capacity == 0


def test_a_window_keeps_the_first_tokens_and_slides_by_half():
    world = World(make_table(window=64), 70)
    assert world.table.draft_lag(70) == NUM_SINK_TOKENS + 32
    world.table.reserve(70)
    world.round(3, 0)
    assert world.text[:5] == [0, 1, 2, 3, 38]
    assert world.table.context_lens[DRAFT] == 70  # of the sequence, of which 34 tokens were never run
    assert world.table.draft_position == 36
    while world.table.num_skipped == 34:
        world.round(3, 0)
    assert world.table.draft_position == NUM_SINK_TOKENS + 32  # the sinks stayed, the rest was run anew
    world.check()


def test_who_finds_no_room_gives_up_all_of_it():
    table = make_table(num_draft_blocks=3)
    world = World(table, 10)
    table.reserve(10)
    assert world.round(9, 1) == 2  # of three blocks' twelve slots
    assert world.round(9, 0) == 0  # all of them are known tokens' by now
    assert world.round(1, 0) is None
    assert table.draft_entries == []
    assert table.context_lens[DRAFT] == 0
    table.check_integrity()


def test_a_fork_shares_the_targets_blocks_and_has_a_draft_that_begins_anew():
    table = make_table()
    world = World(table, 10)
    table.reserve(10)
    world.round(2, 1)
    child, pairs = table.fork(9)
    assert (child.blocks[:2], len(pairs)) == (table.blocks[:2], 1)
    assert child.context_lens == [9, 0]
    assert child.draft_entries == []
    child.check_integrity()


def test_truncating_one_pool_leaves_the_others_blocks():
    table = make_table()
    table.reserve(20)
    table.advance(TARGET, 20)
    table.reserve_draft(20)
    table.advance(DRAFT, 20)
    assert table.truncate(TARGET, 8) == 3
    assert (len(table.blocks), len(table.draft_entries)) == (2, 5)
    assert table.truncate(DRAFT, 5) == 3
    assert (len(table.blocks), len(table.draft_entries)) == (2, 2)
    with pytest.raises(ValueError, match=r"num_tokens must be in 0\.\.5, the draft's context, got 6"):
        table.truncate(DRAFT, 6)


def test_settling_is_advancing_and_truncating_both():
    rng = random.Random(0)
    for _ in range(50):
        tables = [make_table(window=64), make_table(window=64)]
        known = rng.randint(1, 90)
        for table in tables:
            table.reserve(known + 4)
            table.reserve_draft(known, 4)
            run = len(table.draft_text(list(range(known)), known))
            table.advance(TARGET, known)
            table.advance(DRAFT, run)
        ends = [rng.randint(known // 2, known), rng.randint(known // 2, known)]
        tables[0].truncate(TARGET, ends[0])
        tables[0].truncate(DRAFT, min(ends[1], tables[0].context_lens[DRAFT]))
        tables[1].settle([ends[0], min(ends[1], tables[1].context_lens[DRAFT])])
        assert tables[0].context_lens == tables[1].context_lens
        assert tables[0].blocks == tables[1].blocks
        assert tables[0].draft_entries == tables[1].draft_entries
        tables[1].check_integrity()
