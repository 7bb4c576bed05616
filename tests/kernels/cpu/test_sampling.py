"""The C++ choice of tokens: the same as by the book, and as the torch path's, on every input."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specpaged.sampling.noise import gumbel_noise, row_keys
from specpaged_kernels.cpu.sampling import Choice, choose, choose_ref

NEG_INF, INF, NAN = float("-inf"), float("inf"), float("nan")

# A coarse grid makes ties common; of values far apart most weigh nothing.
logit = st.one_of(st.sampled_from([-4.0, -0.0, 0.0, 1.0, 1.5, 3.0, NEG_INF]), st.floats(-40, 40, width=32))
hostile = st.sampled_from([INF, NAN, -3e38, 3e38, 1e-42])


@st.composite
def rows_to_choose(draw):
    vocab_size = draw(st.sampled_from([1, 2, 7, 8, 9, 31, 64, 100, 200]))
    logits = draw(st.lists(logit, min_size=vocab_size, max_size=vocab_size))
    if draw(st.integers(0, 4)) == 0:
        logits[draw(st.integers(0, vocab_size - 1))] = draw(hostile)
    has_noise = draw(st.booleans())
    seed = draw(st.integers(0, 2**64 - 1))
    choice = Choice(
        temperature=draw(st.sampled_from([0.0, 0.3, 0.8, 1.0, 1.7])),
        min_p=draw(st.sampled_from([0.0, 0.05, 0.5, 1.0])),
        top_k=draw(st.sampled_from([0, 1, 2, 5, vocab_size, vocab_size + 7])),
        top_p=draw(st.sampled_from([1.0, 1e-6, 0.25, 0.3, 0.5, 0.9, 0.999, 1 - 2**-53])),
        keys=row_keys(seed, 3) if has_noise else None,
    )
    return logits, choice, gumbel_noise([seed], [3], vocab_size, "cpu")


def same(found, expected):
    assert found.ok.tolist() == expected.ok.tolist()
    assert found.token_ids.tolist() == expected.token_ids.tolist()


@settings(max_examples=400)
@given(rows_to_choose())
def test_it_chooses_as_the_reference_does(drawn):
    logits, choice, noise = drawn
    row = torch.tensor([logits])
    found, expected = choose(row, [choice], wants_logprobs=True), choose_ref(row, [choice], noise)
    same(found, expected)
    if bool(row[row > NEG_INF].abs().max() < 1e30 if bool((row > NEG_INF).any()) else False):
        assert found.logprobs.tolist() == pytest.approx(expected.logprobs.tolist(), abs=2e-5, nan_ok=True)


def test_of_equals_that_top_k_and_top_p_part_the_first_ones_stay():
    """A row of equals: five of 100 stay, or a quarter; whatever noise says, it says it of these."""
    row = torch.zeros(1, 100)
    for choice, num_kept in ((Choice(top_k=5), 5), (Choice(top_p=0.25), 25), (Choice(top_k=50, top_p=0.5), 25)):
        chosen = set()
        for seed in range(400):
            chosen |= set(choose(row, [choice._replace(keys=row_keys(seed, 0))]).token_ids.tolist())
        assert chosen == set(range(num_kept))


@pytest.mark.parametrize("vocab_size", [1000, 50_257, 151_936])
@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])
def test_in_a_large_vocabulary_it_takes_what_the_largest_sum_of_all_says(vocab_size, scale):
    """None of the tokens that it leaves out would have been chosen."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = scale * torch.randn(8, vocab_size, generator=generator)
    noise = gumbel_noise(range(8), [5] * 8, vocab_size, "cpu")
    found = choose(logits, [Choice(keys=row_keys(seed, 5)) for seed in range(8)])
    assert found.token_ids.tolist() == (logits + noise).max(dim=-1).indices.tolist()


@pytest.mark.parametrize("size", [2.0**22, 2.0**26, 2.0**30, 3e38])
def test_of_equal_sums_with_noise_the_first_is_chosen(size):
    """Next to values as large noise is rounded to a few steps, or to none."""
    generator = torch.Generator().manual_seed(1)
    step = torch.tensor(size).nextafter(torch.tensor(0.0)) - size
    logits = size + step * torch.randint(0, 3, (20, 5000), generator=generator)
    noise = gumbel_noise(range(20), [2] * 20, 5000, "cpu")
    expected = (logits + noise).max(dim=-1)
    assert int((logits + noise == expected.values.unsqueeze(-1)).sum()) > 20  # there are such rows
    found = choose(logits, [Choice(keys=row_keys(seed, 2)) for seed in range(20)])
    assert found.token_ids.tolist() == expected.indices.tolist()


def test_rows_are_alike_whatever_rows_and_strides_are_beside_them(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    wide = 3 * torch.randn(9, 1010, generator=generator)
    logits = wide[:, :1003]
    choices = [
        Choice(0.5 + 0.1 * i, 0.01 * (i % 2), 40 * (i % 3), 0.5 + 0.05 * i, row_keys(i, i) if i % 4 else None)
        for i in range(9)
    ]
    together = choose(logits, choices, wants_logprobs=True)
    for r, choice in enumerate(choices):
        alone = choose(logits[r : r + 1].contiguous(), [choice], wants_logprobs=True)
        assert [x.tolist() for x in alone] == [x[r : r + 1].tolist() for x in together]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert [x.tolist() for x in choose(logits, choices, wants_logprobs=True)] == [x.tolist() for x in together]
    finally:
        torch.set_num_threads(threads)


def test_a_row_without_a_token_is_not_ok_and_its_id_is_in_the_vocabulary():
    logits = torch.zeros(4, 5)
    logits[1], logits[2, 3], logits[3, 1] = NEG_INF, NAN, INF
    for keys in (None, row_keys(1, 1)):
        found = choose(logits, [Choice(top_k=2, top_p=0.9, min_p=0.1, keys=keys)] * 4, wants_logprobs=True)
        assert found.ok.tolist() == [True, False, False, True]
        assert found.token_ids[1:].tolist() == [0, 0, 1]
        assert found.logprobs.isnan().tolist() == [False, True, True, False]


@pytest.mark.parametrize(
    ("logits", "choices", "named"),
    [
        (torch.zeros(2, 5), [Choice()], "choices are 1; allowed: 2"),
        (torch.zeros(1, 5, dtype=torch.float64), [Choice()], "torch.float64"),
        (torch.zeros(5, 2).T[:1], [Choice()], "V contiguous"),
        (torch.zeros(1, 0), [Choice()], "0 ids"),
        (torch.zeros(1, 5), [Choice(top_p=0.0)], "top_p above 0"),
        (torch.zeros(1, 5), [Choice(temperature=math.nan)], "temperature"),
        (torch.zeros(1, 5), [Choice(top_k=-1)], "top_k from 0"),
    ],
)
def test_what_it_cannot_read_is_refused_by_name(logits, choices, named):
    with pytest.raises(ValueError, match=named):
        choose(logits, choices)
