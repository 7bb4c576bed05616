"""EQSPEC's batches: fixed until all of their sequences have ended."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from specpaged.engine.sequence import SequenceStatus
from specpaged.research.eqspec import EqspecScheduler
from tests.scheduling.world import make_scheduler, make_sequence, run_step


@settings(max_examples=60)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 17)), min_size=1, max_size=11),
    num_blocks=st.integers(12, 40),
    budget=st.integers(4, 40),
    k=st.integers(0, 5),
    seed=st.integers(0, 1000),
)
def test_nobody_joins_a_batch_that_runs_and_everybody_finishes(lengths, num_blocks, budget, k, seed):
    """Preempted in between or not: the batches are the arrivals, four by four."""
    scheduler = make_scheduler(num_blocks=num_blocks, budget=budget, k=k, kind=EqspecScheduler)
    sequences = [make_sequence(scheduler, str(i), p, m, k) for i, (p, m) in enumerate(lengths)]
    batches = [set(sequences[i : i + 4]) for i in range(0, len(sequences), 4)]
    rng = random.Random(seed)
    while len(scheduler):
        step = scheduler.schedule()
        assert step.entries
        (batch,) = [b for b in batches if b & {entry.sequence for entry in step.entries}]
        assert all(s.status is SequenceStatus.FINISHED for b in batches[: batches.index(batch)] for s in b)
        run_step(scheduler, step, lambda drafts: rng.randint(0, drafts))
        scheduler.check_integrity()
    assert scheduler.allocator.num_free == num_blocks
    assert scheduler.batch == set()


def test_a_sequence_that_is_aborted_while_it_waits_is_waited_for_no_more():
    scheduler = make_scheduler(budget=4, kind=EqspecScheduler)
    first, second, third = (make_sequence(scheduler, name, 6, max_tokens=1) for name in "abc")
    scheduler.max_num_seqs = 2
    step = scheduler.schedule()
    assert [entry.sequence for entry in step.entries] == [first]
    scheduler.finish(second)
    run_step(scheduler, step, lambda drafts: 0)
    run_step(scheduler, scheduler.schedule(), lambda drafts: 0)
    assert first.status is SequenceStatus.FINISHED
    assert [entry.sequence for entry in scheduler.schedule().entries] == [third]
