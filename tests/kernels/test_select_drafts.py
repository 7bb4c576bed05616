"""Which drafts the target verifies, in Triton's interpreter."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specpaged.speculation.tetris import tetris
from specpaged_kernels import select_drafts as module
from specpaged_kernels.decoding_round import Plan, store_drafts, store_drafts_ref
from specpaged_kernels.select_drafts import select_drafts, select_drafts_ref
from tests.kernels.test_decoding_round import copy, ints, rows_of

NAN, INF = float("nan"), float("inf")


def plan_of(depths: list[int], runs: list[bool], num_steps: int) -> Plan:
    """Of a target's pass that starts at 10, 11, ... with all of these drafts; what the draft runs does not matter."""
    starts, ends, num_logits = (torch.full((num_steps + 1, len(depths)), -7, dtype=torch.int32) for _ in range(3))
    starts[-1] = torch.arange(10, 10 + len(depths))
    num_logits[-1] = ints([(depth + 1) * ran for depth, ran in zip(depths, runs, strict=True)])
    ends[-1] = starts[-1] + num_logits[-1]
    return Plan(ints([depth * ran for depth, ran in zip(depths, runs, strict=True)]), starts, ends, num_logits)


def chances_of(rows: list[list[float]], num_steps: int) -> torch.Tensor:
    """NaN where there is no draft: it is not to be looked at."""
    return torch.tensor([row + [NAN] * (num_steps - len(row)) for row in rows])


def test_the_worked_example_of_the_docstring():
    chances = chances_of([[-0.1, -0.3, -2.1], [-0.7, -1.9], [-0.1, -0.3, -0.6]], 3)
    plan = plan_of([3, 2, 3], [True] * 3, 3)
    for select in (select_drafts, select_drafts_ref):
        ends, num_logits = select(plan, chances, 2)
        assert num_logits.tolist() == [3, 2, 4]
        assert ends.tolist() == [13, 13, 16]


@st.composite
def batches(draw):
    """Depths, who runs, and log-probabilities: few of them, so that many are equal."""
    num_steps = draw(st.integers(1, 5))
    depths = draw(st.lists(st.integers(0, num_steps), min_size=1, max_size=5))
    runs = draw(st.lists(st.booleans(), min_size=len(depths), max_size=len(depths)))
    logprob = st.sampled_from([0.0, -0.125, -0.25, -1.0, -8.0, NAN, 1e-7])
    logprobs = [draw(st.lists(logprob, min_size=depth, max_size=depth)) for depth in depths]
    return num_steps, [depth * ran for depth, ran in zip(depths, runs, strict=True)], runs, logprobs


@settings(max_examples=25)
@example(batch=(3, [3, 2, 3], [True] * 3, [[0.0] * 3, [0.0] * 2, [0.0] * 3]), num_selected=1)  # all are equal
@example(batch=(2, [2, 0, 2], [True, False, True], [[-1.0, NAN], [], [-1.0, 0.0]]), num_selected=1)
@given(batch=batches(), num_selected=st.sampled_from([0, 1, 1, 2, 3]))
def test_the_likeliest_of_the_batch_are_selected(batch, num_selected):
    """As the reference and the host's rule have it: beginnings of drafts, no more in all than there is room for, and
    none that is left out would have come before one that is not."""
    num_steps, depths, runs, logprobs = batch
    rows = rows_of(*([[1] * len(depths)] * 5))
    theirs = copy(rows)
    chances, expected = (torch.full((len(depths), num_steps), NAN) for _ in range(2))
    for step in range(num_steps):
        counts = [int(depth > step) for depth in depths]
        cu_logits, made = ints([0, *accumulate(counts)]), sum(counts)
        of_step = [of_row[step] for of_row, depth in zip(logprobs, depths, strict=True) if depth > step]
        of_step, sampled = torch.tensor([*of_step, NAN]), torch.arange(made + 1)  # with a row of filler
        store_drafts(rows, sampled, cu_logits, step, of_step, chances)
        store_drafts_ref(theirs, sampled, cu_logits, step, of_step, expected)
    assert torch.equal(rows.token_ids, theirs.token_ids)
    assert torch.equal(chances.nan_to_num(9), expected.nan_to_num(9))
    for row, depth in zip(chances.tolist(), depths, strict=True):
        assert all(later <= earlier <= 0 for earlier, later in pairwise(row[:depth]))
        assert all(value != value for value in row[depth:])
    plan = plan_of(depths, runs, num_steps)
    ends, num_logits = select_drafts(plan, chances, num_selected)
    for got, reference in zip((ends, num_logits), select_drafts_ref(plan, chances, num_selected), strict=True):
        assert torch.equal(got, reference)
    assert torch.equal(ends, plan.starts[-1] + num_logits)
    assert num_logits.bool().tolist() == runs
    possible = [[x for x in row[:depth] if x > -INF] for row, depth in zip(chances.tolist(), depths, strict=True)]
    selected = tetris(possible, num_selected * sum(runs))
    assert num_logits.tolist() == [count + ran for count, ran in zip(selected, runs, strict=True)]
    assert sum(selected) == min(num_selected * sum(runs), sum(map(len, possible)))


def test_a_batch_of_several_tiles_is_one_order(monkeypatch):
    """More sequences than a program looks at together; the likeliest are in the last tile."""
    monkeypatch.setattr(module, "BLOCK_B", 2)
    num_seqs = 7
    chances = torch.arange(-num_seqs, 0, dtype=torch.float32).unsqueeze(-1).expand(-1, 2).contiguous()
    chances[:, 1] -= 0.5
    plan = plan_of([2] * num_seqs, [i > 0 for i in range(num_seqs)], 2)
    for got, expected in zip(select_drafts(plan, chances, 1), select_drafts_ref(plan, chances, 1), strict=True):
        assert torch.equal(got, expected)
