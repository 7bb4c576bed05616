"""Acceptance on the device, in Triton's interpreter, against its reference and the noise of the sampling code."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from specpaged.sampling import noise
from specpaged_kernels.accept import Written, accept, accept_ref, gumbel, sample, sample_ref


def assert_same(got, expected):
    for name in ("num_outputs", "num_accepted", "ok", "context_lens", "num_blocks"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    for ours, theirs, count in zip(got.token_ids, expected.token_ids, expected.num_outputs.tolist(), strict=True):
        assert torch.equal(ours[:count], theirs[:count])


def run_both(logits, drafts, query_lens, context_lens, block_size, keys=None, values=None):
    """Kernel and reference on ragged drafts: (kernel's, reference's), page tables compared."""
    counts = [len(ids) for ids in drafts]
    padded = torch.zeros(len(drafts), max([*counts, 1]), dtype=torch.int64)
    for row, ids in zip(padded, drafts, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    cu_rows = torch.tensor([0] + [k + 1 for k in counts]).cumsum(0).to(torch.int32)
    query_lens, context_lens = (torch.tensor(x, dtype=torch.int32) for x in (query_lens, context_lens))
    width = max(-(-int(c + q) // block_size) for c, q in zip(context_lens, query_lens, strict=True)) + 1
    table = torch.arange(1, 1 + len(drafts) * width, dtype=torch.int32).view(len(drafts), width)
    tables = [table.clone(), table.clone()]
    written = [Written(query_lens, context_lens, table, block_size) for table in tables]
    got = accept(logits, padded, cu_rows, keys, written[0])
    expected = accept_ref(logits, padded, cu_rows, values, written[1])
    assert_same(got, expected)
    untruncated = accept(logits, padded, cu_rows, keys)
    assert untruncated.context_lens is None
    for name in ("token_ids", "num_outputs", "num_accepted", "ok"):
        assert torch.equal(getattr(untruncated, name), getattr(got, name)), name
    token_ids, ok = sample(logits, keys)
    expected_ids, expected_ok = sample_ref(logits, values)
    assert torch.equal(ok, expected_ok)
    assert torch.equal(token_ids[ok], expected_ids[ok])
    assert torch.equal(*tables)
    return got, expected


def test_the_worked_example_of_the_docstring():
    logits = torch.zeros(8, 12)
    logits[torch.arange(8), torch.tensor([5, 6, 2, 1, 4, 3, 9, 0])] = 1.0
    got, _ = run_both(logits, [[5, 6, 7], [], [8, 9]], [4, 1, 3], [10, 3, 6], 4)
    assert [ids[:n].tolist() for ids, n in zip(got.token_ids, got.num_outputs, strict=True)] == [[5, 6, 2], [4], [3]]
    assert got.num_accepted.tolist() == [2, 0, 0]
    assert got.context_lens.tolist() == [13, 4, 7]
    assert got.num_blocks.tolist() == [4, 1, 2]
    assert got.ok.all()


@settings(max_examples=15)
@given(data=st.data())
def test_kernel_equals_its_reference(data):
    vocab_size = data.draw(st.sampled_from([5, 1024, 4097]))
    counts = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    num_rows = sum(counts) + len(counts)
    # Few values, so that the largest occurs more than once, in other parts of the vocabulary too.
    logits = torch.randint(-3, 3, (num_rows, vocab_size), generator=generator).float()
    for row in data.draw(st.lists(st.integers(0, num_rows - 1), max_size=2)):
        logits[row, data.draw(st.integers(0, vocab_size - 1))] = data.draw(st.sampled_from([float("nan"), 9.0]))
    if data.draw(st.booleans()):
        logits[data.draw(st.integers(0, num_rows - 1))] = float("-inf")
    best, drafts, row = logits.argmax(-1), [], 0
    for k in counts:
        wrong = data.draw(st.integers(0, 8))
        drafts.append([(int(best[row + j]) + (j == wrong)) % vocab_size for j in range(k)])
        row += k + 1
    extra = [data.draw(st.integers(1, 3)) for _ in counts]  # known tokens in the pass
    contexts = [data.draw(st.integers(0, 40)) for _ in counts]
    run_both(logits, drafts, [k + e for k, e in zip(counts, extra, strict=True)], contexts, 16)


@triton.jit
def _gumbel_kernel(keys, output, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    ids = tl.arange(0, BLOCK)
    key_0, key_1, key_2 = tl.load(keys + 4 * row), tl.load(keys + 4 * row + 1), tl.load(keys + 4 * row + 2)
    as_uint = (key_0.to(tl.uint32, bitcast=True), key_1.to(tl.uint32, bitcast=True), key_2.to(tl.uint32, bitcast=True))
    tl.store(output + row * vocab_size + ids, gumbel(ids, as_uint[0], as_uint[1], as_uint[2]), mask=ids < vocab_size)


def test_noise_has_the_bits_of_the_sampling_code():
    seeds, output_idx, vocab_size = [0, 7, 2**63], [0, 3, 100], 3000
    keys = noise.noise_keys(seeds, output_idx, "cpu")
    got = torch.full((3, vocab_size), float("nan"))
    _gumbel_kernel[(3,)](keys, got, vocab_size, BLOCK=4096)
    assert torch.equal(got, noise.gumbel_noise(seeds, output_idx, vocab_size, "cpu"))


@pytest.mark.parametrize("vocab_size", [300, 5000])
def test_coupled_rows_accept_what_their_own_noise_samples_beside_greedy_ones(vocab_size):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, vocab_size, generator=generator) * 2
    seeds, output_idx = [11, 11, 11, 0, 0, 0], [4, 5, 6, 0, 0, 0]
    values = noise.gumbel_noise(seeds, output_idx, vocab_size, "cpu")
    keys = noise.noise_keys(seeds, output_idx, "cpu")
    keys[3:, 3] = 0  # the second sequence is greedy
    values[3:] = 0
    sampled = (logits + values).argmax(-1).tolist()
    assert sampled[:3] != logits[:3].argmax(-1).tolist()
    got, _ = run_both(logits, [sampled[:2], [sampled[3], sampled[4] - 1]], [3, 3], [20, 9], 16, keys, values)
    assert got.token_ids[0].tolist() == sampled[:3]
    assert got.num_accepted.tolist() == [2, 1]
