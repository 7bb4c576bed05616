"""Packing on the device, in Triton's interpreter."""

import dataclasses

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specpaged_kernels.pack import pack, pack_ref


def assert_same(got, expected):
    for field in dataclasses.fields(expected):
        ours, theirs = getattr(got, field.name), getattr(expected, field.name)
        if field.name == "work_list":
            assert_same(ours, theirs)
        else:
            assert torch.equal(ours, theirs), field.name


def run_both(new_tokens, drafts, num_logits, contexts, page_table, block_size, room=0):
    counts = [len(d) for d in drafts]
    padded = torch.full((len(drafts), max([*counts, 1])), 77)  # what is behind num_drafts must not be read
    for row, ids in zip(padded, drafts, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    arguments = (
        torch.tensor([t for ids in new_tokens for t in ids]),
        torch.tensor([0] + [len(ids) for ids in new_tokens]).cumsum(0).to(torch.int32),
        padded,
        *(torch.tensor(x, dtype=torch.int32) for x in (counts, num_logits, contexts)),
        page_table,
        block_size,
        sum(map(len, new_tokens)) + sum(counts) + room,
        sum(num_logits) + room,
        60 + room,
        8,
        32,
    )
    got = pack(*arguments)
    assert_same(got, pack_ref(*arguments))
    return got


def test_the_worked_example_of_the_docstring():
    table = torch.tensor([[2, 7], [1, 0]], dtype=torch.int32)
    got = run_both([[10], [14, 15]], [[11, 12], []], [3, 1], [5, 0], table, 4, room=1)
    assert got.token_ids.tolist() == [10, 11, 12, 14, 15, 0]
    assert got.positions.tolist() == [5, 6, 7, 0, 1, 0]
    assert got.slot_mapping.tolist() == [29, 30, 31, 4, 5, 0]
    assert got.cu_query_lens.tolist() == [0, 3, 5]
    assert got.logits_idx.tolist() == [0, 1, 2, 4, 0]
    assert got.cu_logits.tolist() == [0, 3, 4]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_kernel_equals_its_reference(data):
    num_seqs = data.draw(st.integers(1, 5))
    lens = data.draw(st.lists(st.sampled_from([1, 2, 9, 17, 70]), min_size=num_seqs, max_size=num_seqs))
    counts = data.draw(st.lists(st.integers(0, 7), min_size=num_seqs, max_size=num_seqs))
    contexts = data.draw(st.lists(st.integers(0, 100), min_size=num_seqs, max_size=num_seqs))
    wanted = [data.draw(st.sampled_from([0, k + 1, n + k])) for n, k in zip(lens, counts, strict=True)]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    block_size = data.draw(st.sampled_from([16, 64]))
    width = max(-(-(c + n + k) // block_size) for c, n, k in zip(contexts, lens, counts, strict=True))
    table = torch.randint(1, 2**27, (num_seqs, width), generator=generator, dtype=torch.int32)  # slots need int64
    new_tokens, drafts = (
        [torch.randint(0, 999, (n,), generator=generator).tolist() for n in numbers] for numbers in (lens, counts)
    )
    run_both(new_tokens, drafts, wanted, contexts, table, block_size, room=data.draw(st.integers(0, 3)))
