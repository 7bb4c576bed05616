"""The continuous scheduler alone: no model, only lengths."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specpaged.drafting.draft import Draft
from specpaged.engine.sequence import SequenceStatus
from specpaged.paging.page_table import TARGET
from tests.scheduling.world import make_scheduler, make_sequence, run_step


@settings(max_examples=60)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 17)), min_size=1, max_size=9),
    num_blocks=st.integers(12, 40),
    budget=st.integers(4, 40),
    k=st.integers(0, 5),
    seed=st.integers(0, 1000),
)
def test_every_step_keeps_its_limits_and_everybody_finishes(lengths, num_blocks, budget, k, seed):
    scheduler = make_scheduler(num_blocks=num_blocks, budget=budget, k=k)
    sequences = [make_sequence(scheduler, str(i), p, m, k) for i, (p, m) in enumerate(lengths)]
    rng = random.Random(seed)
    for _ in range(2000):
        if not len(scheduler):
            break
        step = scheduler.schedule()
        assert step.entries, "somebody can always run"
        assert len(step.entries) <= len(scheduler.running) <= 4
        assert sum(e.num_new_tokens + e.num_draft_tokens for e in step.entries) <= budget
        for entry in step.entries:
            table = entry.sequence.page_table
            assert entry.num_new_tokens >= 1
            assert entry.context_len == table.context_lens[TARGET]
            assert table.capacity >= entry.context_len + entry.num_new_tokens + entry.num_draft_tokens
            assert entry.num_draft_tokens == 0 or entry.samples
            room = entry.sequence.params.max_tokens - len(entry.sequence.output_token_ids)
            assert entry.num_draft_tokens <= max(0, min(k, room - 1))
        run_step(scheduler, step, lambda drafts: rng.randint(0, drafts), lambda asked: rng.randint(0, asked))
        scheduler.check_integrity()
    assert all(sequence.status is SequenceStatus.FINISHED for sequence in sequences)
    assert scheduler.allocator.num_free == num_blocks


def test_the_youngest_is_preempted_and_comes_back_first():
    scheduler = make_scheduler(num_blocks=6, budget=64, k=0)
    old, young = make_sequence(scheduler, "old", 11, k=0), make_sequence(scheduler, "young", 11, k=0)
    late = make_sequence(scheduler, "late", 3, k=0)
    run_step(scheduler, scheduler.schedule(), lambda _: 0)  # 3 + 3 blocks: the pool is full, late waits
    assert scheduler.running == [old, young]
    run_step(scheduler, scheduler.schedule(), lambda _: 0)  # 12 tokens each: still 3 blocks
    step = scheduler.schedule()  # the 13th token needs a fourth block
    assert [entry.sequence for entry in step.entries] == [old]
    assert list(scheduler.waiting) == [young, late]
    assert young.page_table.blocks == []
    assert young.metrics.preemptions == scheduler.num_preemptions == 1


def test_drafts_never_preempt_anybody():
    scheduler = make_scheduler(num_blocks=6, budget=64, k=3)
    for name in ("a", "b"):
        make_sequence(scheduler, name, 10, max_tokens=20)
    run_step(scheduler, scheduler.schedule(), lambda _: 0)
    step = scheduler.schedule()  # 11 known tokens each, 3 blocks each: one slot left for a draft
    assert [entry.num_draft_tokens for entry in step.entries] == [1, 1]
    assert scheduler.num_preemptions == 0


@pytest.mark.parametrize("num_drafts", [0, 1, 3], ids="{} of 3 made".format)
def test_slots_for_drafts_keep_nobody_waiting_and_preempt_nobody(num_drafts):
    """Made or not: the drafter may propose fewer than there are slots for."""
    scheduler = make_scheduler(num_blocks=5, budget=64, k=3)
    for name in ("a", "b"):
        make_sequence(scheduler, name, 7, max_tokens=20)
    step = scheduler.schedule()
    run_step(scheduler, step, lambda _: 0, lambda _: num_drafts)  # 8 known tokens each, and a block for drafts of a's
    assert scheduler.allocator.num_free == 0
    make_sequence(scheduler, "c", 4)
    step = scheduler.schedule()
    assert [(e.sequence.request_id, e.num_draft_tokens) for e in step.entries] == [
        ("a", 0),
        ("b", 0),
        ("c", 0),
    ]
    run_step(scheduler, step, lambda _: 0)
    scheduler.check_integrity()
    assert scheduler.num_preemptions == 0


def test_a_draft_gives_back_its_blocks_before_anybody_is_preempted():
    scheduler = make_scheduler(num_blocks=5, budget=64, k=3)
    make_sequence(scheduler, "drafts not", 8, k=0)
    make_sequence(scheduler, "drafts", 7, max_tokens=20)
    run_step(scheduler, scheduler.schedule(), lambda _: 0)
    assert scheduler.allocator.num_free == 0  # 2 blocks, and 3 for 8 known tokens and 3 drafts
    step = scheduler.schedule()  # the 9th token needs a block
    assert [(e.sequence.request_id, e.num_draft_tokens) for e in step.entries] == [("drafts not", 0), ("drafts", 0)]
    assert scheduler.num_preemptions == 0


def test_the_youngest_draft_gives_back_its_blocks_first():
    scheduler = make_scheduler(num_blocks=6, budget=64, k=3)
    old, young = (make_sequence(scheduler, name, 7, max_tokens=20) for name in ("old", "young"))
    run_step(scheduler, scheduler.schedule(), lambda _: 0)
    make_sequence(scheduler, "new", 4)  # for which one of their blocks will do
    assert [(e.sequence, e.num_draft_tokens) for e in scheduler.schedule().entries][:2] == [(old, 3), (young, 0)]


def test_who_runs_in_a_step_keeps_its_slot_when_its_draft_gives_back_blocks():
    """A drafter without KV: behind the target's tokens nothing holds the block of the last known one."""
    scheduler = make_scheduler(num_blocks=5, budget=64, k=4)
    decoding = make_sequence(scheduler, "decoding", 8, max_tokens=20, k=0)
    decoding.max_draft_tokens = 4
    step = scheduler.schedule()
    decoding.page_table.advance(TARGET, 8)
    decoding.append(0)
    assert scheduler.reserve_drafts([decoding]) == [4]  # 9 + 4 tokens, of which 8 have KV: 4 blocks
    decoding.draft = Draft([0] * 4)
    make_sequence(scheduler, "waiting", 5, k=0)
    step = scheduler.schedule()
    assert [(e.sequence.request_id, e.num_draft_tokens) for e in step.entries] == [("decoding", 0), ("waiting", 0)]
    for entry in step.entries:
        entry.sequence.page_table.advance(TARGET, entry.num_new_tokens)
    scheduler.check_integrity()


def test_no_more_drafts_are_made_than_the_next_step_has_room_for():
    """Beside a token of everybody."""
    scheduler = make_scheduler(budget=8, k=3)
    sequences = [make_sequence(scheduler, name, 2, max_tokens=20) for name in "abc"]
    run_step(scheduler, scheduler.schedule(), lambda _: 0)
    assert [len(sequence.draft) for sequence in sequences] == [3, 2, 0]


def test_a_prefill_leaves_room_for_the_drafts_of_those_who_decode():
    scheduler = make_scheduler(budget=16, k=3)
    make_sequence(scheduler, "decoding", 4, max_tokens=20)
    run_step(scheduler, scheduler.schedule(), lambda _: 0)
    make_sequence(scheduler, "long", 30)
    step = scheduler.schedule()
    assert [(e.num_new_tokens, e.num_draft_tokens) for e in step.entries] == [(1, 3), (12, 0)]


def test_drafts_leave_at_least_half_of_the_budget_to_a_prefill():
    scheduler = make_scheduler(budget=16, k=7)
    for name in "abc":
        make_sequence(scheduler, name, 2, max_tokens=30, k=7)
    run_step(scheduler, scheduler.schedule(), lambda _: 0)
    make_sequence(scheduler, "long", 30)
    step = scheduler.schedule()
    assert [e.num_new_tokens for e in step.entries] == [1, 1, 1, 7]
    assert sum(e.num_draft_tokens for e in step.entries) == 6


@pytest.mark.parametrize("missing", [0, 1])
def test_a_sequence_is_admitted_when_its_known_tokens_fit(missing):
    scheduler = make_scheduler(num_blocks=3 - missing, budget=64, k=0)
    make_sequence(scheduler, "a", 12, k=0)
    assert len(scheduler.schedule().entries) == 1 - missing


def test_siblings_wait_for_the_prompt_and_then_share_it():
    scheduler = make_scheduler(budget=8, k=0)
    first = make_sequence(scheduler, "r", 14, k=0)
    second = make_sequence(scheduler, "r", 14, k=0)
    second.fork_source = first
    run_step(scheduler, scheduler.schedule(), lambda _: 0)
    assert scheduler.running == [first]  # 8 of 14 tokens: too early
    run_step(scheduler, scheduler.schedule(), lambda _: 0)
    step = scheduler.schedule()
    assert [entry.sequence for entry in step.entries] == [first, second]
    # 13 tokens shared: three full blocks, and a copy of the fourth, of which one token is the sibling's.
    assert second.page_table.blocks[:3] == first.page_table.blocks[:3]
    assert step.forks == ((first.page_table.blocks[3], second.page_table.blocks[3]),)
    assert step.entries[1].num_new_tokens == 1
