"""Slots for drafts: in a pool that is short of blocks drafts take none, and nothing is drafted in vain."""

from __future__ import annotations

import random

from specpaged.engine.sequence import SequenceStatus
from specpaged.paging.block_allocator import BlockAllocator
from specpaged.paging.page_table import DRAFT
from specpaged.paging.split_page_table import SplitPageTable
from tests.scheduling.world import BLOCK_SIZE, make_scheduler, make_sequence, run_step


def test_all_drafts_go_at_once_and_none_comes_back_before_there_are_blocks():
    scheduler = make_scheduler(num_blocks=9, budget=64, k=4)
    plain = make_sequence(scheduler, "plain", 7, max_tokens=20, k=0)
    a, b = (make_sequence(scheduler, name, 7, max_tokens=20, k=4) for name in "ab")
    run_step(scheduler, scheduler.schedule(), lambda _: 0)  # 8 known tokens: two blocks each, and one for drafts
    assert [len(sequence.page_table.blocks) for sequence in (plain, a, b)] == [2, 3, 3]
    run_step(scheduler, scheduler.schedule(), lambda _: 0)  # 9 known tokens: a takes the last blocks but one for drafts
    assert [len(sequence.page_table.blocks) for sequence in (plain, a, b)] == [2, 4, 2]
    step = scheduler.schedule()  # all need a third block
    assert [entry.num_draft_tokens for entry in step.entries] == [0, 0, 0]
    assert (scheduler.is_short, scheduler.num_released_drafts, scheduler.num_preemptions) == (True, 4, 0)
    run_step(scheduler, step, lambda _: 0)
    for sequence in (a, b):  # 10 known tokens: what the third block still holds, and no block more
        assert len(sequence.draft.token_ids) == 2
        assert len(sequence.page_table.blocks) == 3
    scheduler.finish(plain)
    scheduler.finish(b)
    assert scheduler.reserve_drafts([a]) == [4]
    assert not scheduler.is_short


def test_drafts_that_are_made_in_a_pool_that_is_short_are_verified():
    """Beside plain decoding in as many blocks, which preempts as often or more: it takes more steps."""

    def run(k: int) -> tuple[int, int, int]:
        scheduler = make_scheduler(num_blocks=16, budget=64, k=k, max_num_seqs=4)
        rng = random.Random(3)
        sequences = [make_sequence(scheduler, str(i), rng.randint(2, 9), max_tokens=30, k=k) for i in range(12)]
        num_released = 0
        while len(scheduler):
            was_short, before = scheduler.is_short, scheduler.num_released_drafts
            step = scheduler.schedule()
            num_released += (scheduler.num_released_drafts - before) * was_short
            run_step(scheduler, step, lambda drafts: drafts // 2)
            scheduler.check_integrity()
        assert all(sequence.status is SequenceStatus.FINISHED for sequence in sequences)
        return scheduler.num_preemptions, num_released, scheduler.num_short_steps

    plain, speculative = run(0), run(3)
    assert 0 < speculative[0] <= plain[0]
    assert speculative[1] == 0
    assert speculative[2] > 0


def split_sequences(scheduler, draft_allocator, count: int, num_prompt_tokens: int):
    for i in range(count):
        sequence = make_sequence(scheduler, str(i), num_prompt_tokens, max_tokens=20)
        sequence.page_table = SplitPageTable(scheduler.allocator, draft_allocator, BLOCK_SIZE)
        yield sequence


def test_sequences_beyond_the_drafts_own_pool_decode_plainly_and_are_counted():
    scheduler = make_scheduler(num_blocks=80, budget=64, k=3)
    draft_allocator = BlockAllocator(8)
    sequences = list(split_sequences(scheduler, draft_allocator, 4, num_prompt_tokens=9))
    run_step(scheduler, scheduler.schedule(), lambda _: 0)  # 10 known tokens and 3 drafts: four blocks each
    assert [bool(sequence.draft) for sequence in sequences] == [True, True, False, False]
    assert [sequence.max_draft_tokens for sequence in sequences] == [3, 3, 0, 0]
    assert scheduler.num_without_draft_kv == 2
    for _ in range(8):
        run_step(scheduler, scheduler.schedule(), lambda _: 0)
        draft_allocator.check_integrity([sequence.page_table.draft_entries for sequence in sequences])
    # 17 tokens and drafts are five blocks: the first one that grew took what the second had to do without.
    assert [sequence.max_draft_tokens for sequence in sequences] == [3, 0, 0, 0] or scheduler.num_without_draft_kv == 3
    while len(scheduler):
        run_step(scheduler, scheduler.schedule(), lambda _: 0)
    assert draft_allocator.num_held == 0
    assert all(sequence.page_table.context_lens[DRAFT] == 0 for sequence in sequences)
