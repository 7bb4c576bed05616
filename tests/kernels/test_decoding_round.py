"""What a round does between its passes, in Triton's interpreter."""

import dataclasses
from itertools import accumulate

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specpaged.sampling import noise
from specpaged_kernels.decoding_round import (
    NUM_COUNTS,
    Rows,
    noise_keys,
    plan_round,
    plan_round_ref,
    settle_round,
    settle_round_ref,
    store_drafts,
    store_drafts_ref,
)

LENGTH = 48


def ints(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def rows_of(known, behind, limits, max_drafts, has_draft) -> Rows:
    token_ids = torch.arange(len(known) * LENGTH, dtype=torch.int32).view(len(known), LENGTH) % 5
    return Rows(token_ids, *map(ints, (known, behind, limits, max_drafts, has_draft)))


def copy(rows: Rows) -> Rows:
    return Rows(*(getattr(rows, field.name).clone() for field in dataclasses.fields(rows)))


def assert_same(got: Rows, expected: Rows) -> None:
    for field in dataclasses.fields(expected):
        assert torch.equal(getattr(got, field.name), getattr(expected, field.name)), field.name


@st.composite
def states(draw) -> Rows:
    """Rows of sequences in whatever state, and of nobody."""
    columns = []
    num_rows = 70 if draw(st.integers(0, 9)) == 9 else draw(st.integers(1, 4))  # more than a kernel has in one block
    for _ in range(num_rows):
        if draw(st.booleans()) and draw(st.booleans()):
            columns.append((0, 0, 0, 0, 0))
            continue
        known = draw(st.integers(1, 30))
        limit = min(LENGTH, known + draw(st.integers(0, 6)))
        columns.append((known, max(0, known - draw(st.integers(1, 2))), limit, draw(st.integers(0, 5)),
                        draw(st.integers(0, 1))))  # fmt: skip
    return rows_of(*zip(*columns, strict=True))


def test_the_worked_example_of_the_docstring():
    rows = rows_of([6, 9, 7], [5, 7, 6], [20, 20, 8], [3, 3, 3], [1, 1, 1])
    for plan in (plan_round(rows, 3), plan_round_ref(rows, 3)):
        assert plan.num_drafts.tolist() == [3, 3, 0]
        assert plan.starts.tolist() == [[5, 7, 6], [6, 9, 7], [7, 10, 8], [5, 8, 6]]
        assert plan.ends.tolist() == [[6, 9, 7], [7, 10, 7], [8, 11, 8], [9, 12, 7]]
        assert plan.num_logits.tolist() == [[1, 1, 0], [1, 1, 0], [1, 1, 0], [4, 4, 1]]
    rows.token_ids[0, 6:9], rows.token_ids[1, 9:12] = ints([1, 2, 3]), ints([1, 2, 3])
    sampled, ok = torch.tensor([1, 9, 3, 4, 1, 2, 3, 8, 7]), torch.ones(9, dtype=torch.bool)
    result = torch.zeros(3, NUM_COUNTS + 4, dtype=torch.int32)
    settle_round(rows, sampled, ok, ints([0, 4, 8, 9]), plan.num_drafts, result)
    assert rows.num_tokens.tolist() == [8, 13, 8]
    assert rows.draft_context_lens.tolist() == [7, 11, 7]
    assert result[:, :NUM_COUNTS].tolist() == [[2, 1, 3, 0, 3], [4, 3, 3, 0, 3], [1, 0, 0, 0, 0]]
    assert rows.token_ids[0, 6:8].tolist() == [1, 9]
    assert rows.token_ids[1, 9:13].tolist() == [1, 2, 3, 8]
    assert plan_round(rows, 3).num_logits[-1].tolist() == [4, 4, 0]


@settings(max_examples=60)
@given(rows=states(), num_steps=st.integers(0, 5))
def test_a_plan_is_its_references(rows, num_steps):
    got, expected = plan_round(rows, num_steps), plan_round_ref(rows, num_steps)
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours, theirs)
    runs = got.ends > got.starts
    assert (got.num_logits <= got.ends - got.starts).all()  # no row is looked for in front of a sequence's own
    assert (got.ends.where(runs, 0) <= rows.limits).all()


@settings(max_examples=60)
@given(rows=states(), data=st.data())
def test_what_a_round_leaves_is_its_references(rows, data):
    """Sampled tokens that agree with the drafts now and then, and rows without a token."""
    num_steps = data.draw(st.integers(0, 5))
    plan = plan_round_ref(rows, num_steps)
    theirs = copy(rows)
    for step in range(num_steps):
        counts = plan.num_logits[step].tolist()
        cu_logits = ints([0, *accumulate(counts)])
        sampled = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=sum(counts), max_size=sum(counts))))
        store_drafts(rows, sampled.long(), cu_logits, step)
        store_drafts_ref(theirs, sampled.long(), cu_logits, step)
        assert_same(rows, theirs)
    # Of some drafts no row is run, as where they are selected from.
    left_out = [data.draw(st.integers(0, max(0, count - 1))) for count in plan.num_logits[-1].tolist()]
    counts = (plan.num_logits[-1] - ints(left_out)).tolist()
    total = sum(counts)
    sampled = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=total, max_size=total))).long()
    ok = torch.tensor(data.draw(st.lists(st.integers(0, 4), min_size=total, max_size=total))).bool()
    results = [torch.full((len(counts), NUM_COUNTS + num_steps + 1), -1, dtype=torch.int32) for _ in range(2)]
    before = rows.num_tokens.clone()
    cu_rows = ints([0, *accumulate(counts)])
    end_ids = ints([7 + b for b in range(len(counts))]) if data.draw(st.booleans()) else None
    settle_round(rows, sampled, ok, cu_rows, plan.num_drafts, results[0], end_ids)
    settle_round_ref(theirs, sampled, ok, cu_rows, plan.num_drafts, results[1], end_ids)
    assert_same(rows, theirs)
    assert torch.equal(*results)
    if end_ids is not None:
        assert not (results[0][:, 3] == 1).any()
        assert (rows.num_tokens > before)[ints(counts) > 0].all()  # whoever runs gets a token
    assert (rows.num_tokens <= torch.maximum(rows.limits, before)).all()
    assert ((rows.draft_context_lens < rows.num_tokens) | (rows.num_tokens == 0)).all()


@settings(max_examples=40)
@given(
    seeds=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=3),
    step=st.integers(0, 5),
    filler=st.integers(0, 2),
    data=st.data(),
)
def test_keys_of_noise_are_those_of_the_host(seeds, step, filler, data):
    numbers = st.lists(st.integers(0, 4), min_size=len(seeds), max_size=len(seeds))
    counts, prompts = data.draw(numbers), data.draw(numbers)
    known = [prompt + 1 + count for prompt, count in zip(prompts, data.draw(numbers), strict=True)]
    zeros = [0] * len(seeds)
    rows = rows_of(known, zeros, zeros, zeros, zeros)
    halves = torch.tensor([[seed & 0xFFFFFFFF, seed >> 32] for seed in seeds], dtype=torch.int64).to(torch.int32)
    draws = ints([i % 2 for i in range(len(seeds))])
    cu_logits = ints([0, *accumulate(counts)])
    got = noise_keys(rows, halves, draws, ints(prompts), cu_logits, sum(counts) + filler, step)
    owners = [b for b, count in enumerate(counts) for _ in range(count)]
    output_idx = [known[b] - prompts[b] + step + j for b, count in enumerate(counts) for j in range(count)]
    if owners:
        expected = noise.noise_keys([seeds[b] for b in owners], output_idx, "cpu")
        assert torch.equal(got[: len(owners), :3], expected[:, :3])
        assert torch.equal(got[: len(owners), 3], draws[owners])
    assert not got[len(owners) :].any()
