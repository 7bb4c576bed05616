"""The scheduler of halves alone: no model, only lengths."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from specpaged.engine.sequence import SequenceStatus
from specpaged.paging.page_table import DRAFT, TARGET
from specpaged.scheduling.halves import DRIFT, HalvesScheduler
from tests.scheduling.world import make_scheduler, make_sequence, run_step


@settings(max_examples=60)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 17)), min_size=1, max_size=12),
    num_blocks=st.integers(12, 60),
    budget=st.integers(6, 40),
    k=st.integers(0, 5),
    seed=st.integers(0, 1000),
)
def test_every_step_is_of_one_half_and_everybody_finishes(lengths, num_blocks, budget, k, seed):
    scheduler = make_scheduler(num_blocks=num_blocks, max_num_seqs=6, budget=budget, k=k, kind=HalvesScheduler)
    sequences = [make_sequence(scheduler, str(i), p, m, k) for i, (p, m) in enumerate(lengths)]
    rng, turn, drafting = random.Random(seed), 0, set()
    for _ in range(3000):
        if not len(scheduler):
            break
        whole = rng.random() < 0.05  # a step of all, now and then
        before = set(scheduler.running)
        scheduler.take_turn(None if whole else turn, () if whole else drafting)
        step = scheduler.schedule()
        assert step.entries or not whole
        assert len(scheduler.running) <= 6
        assert sum(e.num_new_tokens + e.num_draft_tokens for e in step.entries) <= budget
        for entry in step.entries:
            sequence, table = entry.sequence, entry.sequence.page_table
            assert table.capacity >= entry.context_len + entry.num_new_tokens + entry.num_draft_tokens
            if not whole:
                assert sequence not in drafting
                assert scheduler.half_of[sequence] == turn or sequence not in before
        if not whole:
            assert set(scheduler.half_of) == set(scheduler.running)
            if not step.preempted:
                assert abs(scheduler.sizes[0] - scheduler.sizes[1]) <= max(1, len(scheduler.running) // DRIFT)
            own = [s for s in scheduler.running if scheduler.half_of[s] == turn and s not in drafting]
            decoding = {s for s in own if s.num_tokens - s.page_table.context_lens[TARGET] == 1}
            assert decoding <= {entry.sequence for entry in step.entries}
        scheduler.check_integrity()
        run_step(scheduler, step, lambda drafts: rng.randint(0, drafts), lambda asked: rng.randint(0, asked))
        scheduler.check_integrity()
        drafting, turn = {entry.sequence for entry in step.entries}, 1 - turn
    assert all(sequence.status is SequenceStatus.FINISHED for sequence in sequences)
    assert scheduler.allocator.num_free == num_blocks


def halves_of(scheduler):
    return [[s.request_id for s in scheduler.running if scheduler.half_of[s] == half] for half in (0, 1)]


def make(num_seqs, max_tokens=40):
    scheduler = make_scheduler(num_blocks=200, max_num_seqs=20, budget=200, kind=HalvesScheduler)
    return scheduler, [make_sequence(scheduler, "abcdefghijkl"[i], 3, max_tokens) for i in range(num_seqs)]


def test_newcomers_join_the_smaller_half_and_run_at_once():
    scheduler, _ = make(4)
    scheduler.take_turn(0)
    assert len(scheduler.schedule().entries) == 4
    assert halves_of(scheduler) == [["a", "c"], ["b", "d"]]
    make_sequence(scheduler, "x", 3)
    scheduler.take_turn(1)
    step = scheduler.schedule()
    assert halves_of(scheduler) == [["a", "c", "x"], ["b", "d"]]
    assert [entry.sequence.request_id for entry in step.entries] == ["b", "d", "x"]


def test_the_youngest_of_the_larger_half_change_over_as_drawn():
    scheduler, sequences = make(10)
    scheduler.take_turn(0)
    run_step(scheduler, scheduler.schedule(), lambda _: 0)
    for sequence in sequences:
        if sequence.request_id in "fhj":
            scheduler.finish(sequence)
    scheduler.take_turn(0)
    step = scheduler.schedule()  # a c e g i and b d
    assert halves_of(scheduler) == [["a", "c", "e", "g"], ["b", "d", "i"]]
    assert [entry.sequence.request_id for entry in step.entries] == ["a", "c", "e", "g"]
    assert scheduler.num_moved == 1
    scheduler.take_turn(1)
    assert [entry.sequence.request_id for entry in scheduler.schedule().entries] == ["b", "d", "i"]


def test_whose_drafts_are_being_made_take_part_in_no_step():
    scheduler, sequences = make(4)
    scheduler.take_turn(0)
    run_step(scheduler, scheduler.schedule(), lambda _: 0)
    scheduler.take_turn(1, set(sequences))
    assert scheduler.schedule().entries == ()
    scheduler.take_turn(1, {sequences[1]})
    assert [entry.sequence for entry in scheduler.schedule().entries] == [sequences[3]]


def test_the_youngest_gives_up_its_blocks_though_its_drafts_are_being_made():
    scheduler = make_scheduler(num_blocks=6, budget=64, k=0, kind=HalvesScheduler)
    old, young = make_sequence(scheduler, "old", 11, k=0), make_sequence(scheduler, "young", 11, k=0)
    scheduler.take_turn(0)
    run_step(scheduler, scheduler.schedule(), lambda _: 0)
    assert scheduler.half_of == {old: 0, young: 1}
    scheduler.take_turn(0)
    run_step(scheduler, scheduler.schedule(), lambda _: 0)
    scheduler.take_turn(0, {young})
    step = scheduler.schedule()  # old's 13th token needs a block, and there is none
    assert step.preempted == (young,)
    assert [entry.sequence for entry in step.entries] == [old]
    scheduler.check_integrity()
    assert old.page_table.context_lens[TARGET] == 12
    assert len(old.page_table.context_lens) == DRAFT
