"""Packing on the device, in Triton's interpreter."""

import dataclasses
import random
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specpaged.modeling.attention.triton_pass import work_list_of
from specpaged.modeling.ragged_batch import RaggedRow
from specpaged.modeling.ragged_batch import pack as pack_on_host
from specpaged_kernels import pack as pack_kernel
from specpaged_kernels.pack import pack, pack_ref


def assert_same(got, expected):
    for field in dataclasses.fields(expected):
        ours, theirs = getattr(got, field.name), getattr(expected, field.name)
        if field.name == "work_list":
            assert_same(ours, theirs)
        else:
            assert torch.equal(ours, theirs), field.name


def run_both(sequences, starts, num_logits, page_table, block_size, room=0):
    """`sequences` are all tokens of each; they run from `starts` to their ends."""
    lengths = [len(ids) for ids in sequences]
    padded = torch.full((len(sequences), max(map(len, sequences)) + 1), 77, dtype=torch.int32)
    for row, ids in zip(padded, sequences, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    num_rows = sum(lengths) - sum(starts)
    arguments = (
        padded,
        *(torch.tensor(x, dtype=torch.int32) for x in (starts, lengths, num_logits)),
        page_table,
        block_size,
        num_rows + room,
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
    got = run_both([[1, 2, 3, 4, 5, 10, 11, 12], [14, 15]], [5, 0], [3, 1], table, 4, room=1)
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
    lens = data.draw(st.lists(st.sampled_from([0, 1, 2, 9, 17, 70]), min_size=num_seqs, max_size=num_seqs))
    contexts = data.draw(st.lists(st.integers(0, 100), min_size=num_seqs, max_size=num_seqs))
    wanted = [data.draw(st.sampled_from([0, min(1, n), n])) for n in lens]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    block_size = data.draw(st.sampled_from([16, 64]))
    width = max(1, *(-(-(c + n) // block_size) for c, n in zip(contexts, lens, strict=True)))
    table = torch.randint(1, 2**27, (num_seqs, width), generator=generator, dtype=torch.int32)  # slots need int64
    sequences = [
        torch.randint(0, 999, (c + n,), generator=generator).tolist() for c, n in zip(contexts, lens, strict=True)
    ]
    run_both(sequences, contexts, wanted, table, block_size, room=data.draw(st.integers(0, 3)))


def random_rows(draw: random.Random) -> list[tuple[int, int, int]]:
    """(context, tokens, of how many of them logits are wanted): few sequences, as the interpreter takes them in turn,
    and now and then many; some of them run nothing."""
    num_seqs = draw.choice([1, 2, 2, 3, 3, 4, 5]) if draw.random() < 0.995 else draw.randint(20, 70)
    lens = [draw.choice([0, 1, 1, 2, 3, draw.randint(1, 9)]) for _ in range(num_seqs - 1)] + [draw.randint(1, 9)]
    draw.shuffle(lens)
    return [(draw.randint(0, 40), n, draw.choice([0, 1, n])) for n in lens]


@pytest.mark.parametrize("part", range(4))
def test_a_batch_of_the_device_is_the_hosts_in_every_field(part):
    """`specpaged.modeling.ragged_batch.pack` of the same sequences, whose tokens and blocks are random; 1,000 times."""
    for seed in range(125 * part, 125 * (part + 1)):
        draw = random.Random(seed)
        assert_is_the_hosts(random_rows(draw), draw)


@settings(max_examples=20)
@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=3).filter(
        lambda rows: any(num_tokens for _, num_tokens, _ in rows)
    ),
    seed=st.integers(0, 2**20),
)
def test_a_batch_of_the_device_is_the_hosts_whatever_its_rows(rows, seed):
    """As above, and hypothesis says with how little it fails if it does."""
    assert_is_the_hosts(rows, random.Random(seed))


def test_a_batch_of_hundreds_is_the_hosts():
    """Which a larger variant of the kernel packs: sequences without rows are taken in a blink."""
    draw = random.Random(0)
    rows = [(draw.randint(0, 40), n, min(n, 1)) for n in ([0] * 8 + [1, 3]) * 7]
    assert len(rows) > pack_kernel.BLOCKS[0]
    assert_is_the_hosts(rows, draw)


def assert_is_the_hosts(rows: list[tuple[int, int, int]], draw: random.Random) -> None:
    shares = [
        RaggedRow([draw.randrange(9999) for _ in range(n)], context, draw.sample(range(1, 99), -(-(context + n) // 16)),
                  min(wanted, n))
        for context, n, wanted in rows
    ]  # fmt: skip
    host = pack_on_host(shares, 16)
    sequence_ids = torch.full((len(shares), 64), -1, dtype=torch.int32)
    for own, row in zip(sequence_ids, shares, strict=True):
        own[row.context_len : row.context_len + len(row.token_ids)] = torch.tensor(row.token_ids)
    lens = torch.tensor([len(row.token_ids) for row in shares], dtype=torch.int32)
    num_logits = torch.tensor([row.num_logits for row in shares], dtype=torch.int32)
    work_list = work_list_of(host, 4, 32)
    got = pack(
        sequence_ids, host.context_lens, host.context_lens + lens, num_logits, host.page_table, 16,
        host.num_tokens, len(host.logits_idx), len(work_list.item_seq), 4, 32,
    )  # fmt: skip
    for name in ("token_ids", "positions", "slot_mapping", "cu_query_lens", "logits_idx"):
        assert torch.equal(getattr(got, name), getattr(host, name)), name
    assert_same(got.work_list, work_list)
    assert got.cu_logits.tolist() == [0, *accumulate(host.num_logits)]


def test_what_has_no_room_is_lost_and_not_strewn(monkeypatch):
    """Three rows, two logits and two items too few: what fits is right, and nothing lies behind it."""
    guarded = []
    honest = torch.empty

    def empty(size, **options):
        memory = honest(size + 64, **options).fill_(-7)
        guarded.append((memory, size))
        return memory[:size]

    starts, ends = (torch.tensor(x, dtype=torch.int32) for x in ([40, 3], [60, 13]))
    table = torch.arange(1, 9, dtype=torch.int32).view(2, 4)
    wanted = torch.tensor([5, 6], dtype=torch.int32)
    arguments = (torch.arange(128, dtype=torch.int32).view(2, 64), starts, ends, wanted, table, 16)
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
