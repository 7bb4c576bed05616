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


@settings(max_examples=25)
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


def test_what_has_no_room_is_lost_and_not_strewn(monkeypatch):
    """Three rows, two logits and two items too few: what fits is right, and nothing lies behind it."""
    guarded = []
    honest = torch.empty

    def empty(size, **options):
        memory = honest(size + 64, **options).fill_(-7)
        guarded.append((memory, size))
        return memory[:size]

    new_tokens, contexts = torch.arange(30), torch.tensor([40, 3], dtype=torch.int32)
    lens = torch.tensor([0, 20, 30], dtype=torch.int32)
    table = torch.arange(1, 9, dtype=torch.int32).view(2, 4)
    zeros = torch.zeros(2, dtype=torch.int32)
    drafts, wanted = torch.zeros(2, 1, dtype=torch.int64), torch.tensor([5, 6], dtype=torch.int32)
    arguments = (new_tokens, lens, drafts, zeros, wanted, contexts, table, 16)
    whole = pack_ref(*arguments, 30, 11, 5, 8, 32)
    assert len(whole.work_list.item_seq) == int(whole.work_list.cu_items[-1]) == 5
    monkeypatch.setattr(torch, "empty", empty)
    got = pack(*arguments, 27, 9, 3, 8, 32)
    monkeypatch.undo()
    assert len(guarded) == 8
    for memory, size in guarded:
        assert (memory[size:] == -7).all()
    for name, size in (("token_ids", 27), ("positions", 27), ("slot_mapping", 27), ("logits_idx", 9)):
        assert torch.equal(getattr(got, name), getattr(whole, name)[:size]), name
    assert torch.equal(got.work_list.item_seq, whole.work_list.item_seq[:3])
