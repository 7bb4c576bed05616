"""The passes of a proposal, laid out ahead, are those that would be packed one by one."""

import dataclasses

import torch
from hypothesis import given
from hypothesis import strategies as st

from specpaged.drafting.base import DraftRow
from specpaged.drafting.draft import NO_DRAFT
from specpaged.drafting.draft_steps import DraftSteps
from specpaged.modeling.forward_output import DraftedTokens
from specpaged.modeling.ragged_batch import RaggedBatch, RaggedRow, pack


def run(rows: list[DraftRow], block_size: int) -> tuple[list[list[int]], list[RaggedBatch], list[RaggedBatch]]:
    """Draft s of row i is 100 * i + s: the drafts, the batches, and the batches as `pack` makes them."""
    steps = DraftSteps(rows, block_size, "cpu")
    sampled, batches, expected = [], [], []
    for step, request_idx in enumerate(steps.request_idx):
        alive = [row for row in rows if row.num_draft_tokens > step]
        assert request_idx == [row.request_idx for row in alive]
        if step:
            source_idx = steps.source_idx[step]
            batches.append(steps.batch(step, sampled[-1] if source_idx is None else sampled[-1][source_idx]))
            packed = [
                RaggedRow((100 * row.request_idx + step - 1,), row.context_len + len(row.token_ids) + step - 1,
                          row.blocks, 1)
                for row in alive
            ]  # fmt: skip
            expected.append(pack(packed, block_size))
        sampled.append(torch.tensor([100 * row.request_idx + step for row in alive]))
    drafts = [NO_DRAFT] * len(rows)
    steps.drafts([DraftedTokens(token_ids, -token_ids.float()) for token_ids in sampled], drafts)
    assert all(list(draft.logprobs) == [-token_id for token_id in draft.token_ids] for draft in drafts)
    return [draft.token_ids for draft in drafts], batches, expected


def same(got: RaggedBatch, expected: RaggedBatch) -> None:
    for field in dataclasses.fields(RaggedBatch):
        ours, theirs = getattr(got, field.name), getattr(expected, field.name)
        if field.name == "page_table":
            # Laid out ahead it may reach further: over the blocks that later steps write to.
            assert torch.equal(ours[:, : theirs.shape[1]], theirs)
            assert ours.dtype == theirs.dtype
        elif isinstance(theirs, torch.Tensor):
            assert ours.dtype == theirs.dtype, field.name
            assert torch.equal(ours, theirs), field.name
        else:
            assert ours == theirs, field.name


def test_the_worked_example():
    """8, 3 and 5 known tokens, of which the last are new to the drafter; 3, 1 and 2 drafts."""
    rows = [
        DraftRow(None, [1, 2], 6, [4, 2, 7], 3, 0),
        DraftRow(None, [1], 2, [3], 1, 1),
        DraftRow(None, [1, 2, 3, 4, 5], 0, [5, 6], 2, 2),
    ]
    drafts, batches, expected = run(rows, 4)
    assert [source_idx.tolist() for source_idx in DraftSteps(rows, 4, "cpu").source_idx[1:]] == [[0, 2], [0]]
    assert [batch.positions.tolist() for batch in batches] == [[8, 5], [9]]
    assert [batch.slot_mapping.tolist() for batch in batches] == [[28, 25], [29]]
    assert drafts == [[0, 1, 2], [100], [200, 201]]
    for got, wanted in zip(batches, expected, strict=True):
        same(got, wanted)


@given(
    shapes=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 4), st.integers(1, 6)), min_size=1, max_size=6),
    block_size=st.sampled_from([1, 4, 16]),
)
def test_any_rows(shapes, block_size):
    rows, block = [], 1
    for i, (context_len, known, drafts) in enumerate(shapes):
        count = -(-(context_len + known + drafts) // block_size)
        rows.append(DraftRow(None, list(range(known)), context_len, list(range(block, block + count)), drafts, i))
        block += count
    drafts, batches, expected = run(rows, block_size)
    assert drafts == [[100 * i + step for step in range(count)] for i, (_, _, count) in enumerate(shapes)]
    for got, wanted in zip(batches, expected, strict=True):
        same(got, wanted)
