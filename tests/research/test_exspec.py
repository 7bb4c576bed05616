"""EXSPEC's batches: of one length, out of a window, wherever that can be."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specpaged.engine.sequence import SequenceStatus
from specpaged.research.exspec import ExspecScheduler
from tests.scheduling.world import make_scheduler, make_sequence, run_step


def make_exspec(max_num_seqs=2, window=5, **options):
    return make_scheduler(max_num_seqs=max_num_seqs, window=window, kind=ExspecScheduler, **options)


def names(step):
    return "".join(entry.sequence.request_id for entry in step.entries)


def settle(scheduler):
    """Fill the window: prefills, of whose drafts none is accepted."""
    while len(scheduler.running) < min(scheduler.window, len(scheduler)):
        run_step(scheduler, scheduler.schedule(), lambda drafts: 0)


def accept(scheduler, **num_accepted):
    """One round; who ran in it."""
    step = scheduler.schedule()
    accepted = iter([num_accepted[entry.sequence.request_id] for entry in step.entries])
    run_step(scheduler, step, lambda drafts: next(accepted))
    return names(step)


@pytest.mark.parametrize("sort_by_length", [False, True])
def test_the_worked_example_of_the_docstring(sort_by_length):
    scheduler = make_exspec(num_blocks=100, budget=200, k=3, sort_by_length=sort_by_length)
    for name, length in zip("ABCDE", (11, 6, 11, 19, 6), strict=True):
        make_sequence(scheduler, name, length, max_tokens=20)
    settle(scheduler)
    assert accept(scheduler, A=1, C=0) == "AC"
    assert accept(scheduler, B=3, E=1) == "BE"
    assert accept(scheduler, A=0, B=0, E=0) == ("BE" if sort_by_length else "AB")
    assert (scheduler.num_grouped_rounds, scheduler.num_fallback_rounds) == (2, 1)


def test_without_grouping_every_round_falls_back():
    scheduler = make_exspec(num_blocks=100, budget=200, sort_by_length=True)
    scheduler.group_by_length = False
    for name, length in zip("ABCD", (9, 7, 8, 9), strict=True):
        make_sequence(scheduler, name, length)
    settle(scheduler)
    assert accept(scheduler, B=0, C=0) == "BC"
    assert (scheduler.num_grouped_rounds, scheduler.num_fallback_rounds) == (0, 1)


def test_of_many_sequences_of_one_length_the_oldest_run():
    scheduler = make_exspec(num_blocks=100, budget=200)
    for name in "ABC":
        make_sequence(scheduler, name, 7)
    settle(scheduler)
    assert accept(scheduler, A=0, B=0) == "AB"


def test_rounds_of_all_that_are_left_count_neither_as_grouped_nor_as_fallback():
    scheduler = make_exspec(3, num_blocks=100, budget=200)
    make_sequence(scheduler, "A", 7)
    make_sequence(scheduler, "B", 7)
    settle(scheduler)
    assert accept(scheduler, A=1, B=0) == "AB"
    assert accept(scheduler, A=0, B=0) == "AB"
    assert (scheduler.num_grouped_rounds, scheduler.num_fallback_rounds) == (0, 0)


def test_a_sequence_that_has_ended_is_replaced_before_the_next_round():
    scheduler = make_exspec(window=2, num_blocks=100, budget=200)
    make_sequence(scheduler, "A", 7, max_tokens=2)
    make_sequence(scheduler, "B", 7)
    make_sequence(scheduler, "C", 9)
    settle(scheduler)
    assert accept(scheduler, A=0, B=0) == "AB"
    assert accept(scheduler, C=0) == "C"  # its prefill
    assert accept(scheduler, B=0, C=0) == "BC"


@settings(max_examples=60)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 17)), min_size=1, max_size=11),
    num_blocks=st.integers(12, 60),
    budget=st.integers(4, 60),
    k=st.integers(0, 5),
    window=st.integers(3, 6),
    sort_by_length=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_rounds_are_of_one_length_or_fall_back_and_everybody_finishes(
    lengths, num_blocks, budget, k, window, sort_by_length, seed
):
    scheduler = make_exspec(3, window, num_blocks=num_blocks, budget=budget, k=k, sort_by_length=sort_by_length)
    sequences = [make_sequence(scheduler, str(i), p, m, k) for i, (p, m) in enumerate(lengths)]
    rng = random.Random(seed)
    while len(scheduler):
        grouped, preemptions = scheduler.num_grouped_rounds, scheduler.num_preemptions
        step = scheduler.schedule()
        assert step.entries
        assert len(step.entries) <= 3
        assert len(scheduler.running) <= window
        of_step = [entry.sequence for entry in step.entries]
        if scheduler.num_grouped_rounds > grouped:
            assert len({sequence.num_tokens for sequence in of_step}) == 1
        elif (
            all(e.context_len and e.num_new_tokens == 1 for e in step.entries)
            and scheduler.num_preemptions == preemptions
        ):
            window_order = list(scheduler.running)
            if sort_by_length:
                window_order.sort(key=lambda sequence: sequence.num_tokens)
            assert set(of_step) == set(window_order[: len(of_step)])
        run_step(scheduler, step, lambda drafts: rng.randint(0, drafts))
        scheduler.check_integrity()
    assert all(sequence.status is SequenceStatus.FINISHED for sequence in sequences)
    assert scheduler.allocator.num_free == num_blocks
