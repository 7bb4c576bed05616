import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specpaged.modeling.forward_output import Argmax
from specpaged.sampling import get_sampling_batch
from specpaged.sampling.batch import SamplingBatch
from specpaged.sampling.request import SamplingRequest
from specpaged.sampling_params import SamplingParams
from specpaged_kernels.lm_head import lm_head
from tests.sampling.test_processors import V, rows_of_logits


def request(seed=0, outputs=(), prompt=(1,), **params):
    return SamplingRequest(SamplingParams(**params), seed, list(prompt), list(outputs), stop_ids=(2,))


def test_nothing_to_do_returns_the_very_logits():
    logits = torch.randn(3, 10)
    batch = SamplingBatch([request(temperature=0), request(temperature=1.0)], 10, "cpu")
    assert not batch.needs_processing
    assert batch.process(logits, [0, 0, 1], [0, 1, 0], [[4], []]) is logits


@pytest.mark.parametrize(
    ("params", "all_greedy", "needs_processing"),
    [
        ({"temperature": 0}, True, False),
        ({"temperature": 0, "repetition_penalty": 1.1}, True, True),
        ({"temperature": 0, "top_p": 0.5}, True, False),
        ({"temperature": 1}, False, False),
        ({"temperature": 0.5}, False, True),
        ({"min_tokens": 1}, False, True),
        ({"logit_bias": {3: 1.0}}, False, True),
        ({"allowed_token_ids": [3]}, False, True),
        ({"top_k": 3}, False, True),
        ({"min_p": 0.1}, False, True),
    ],
)
def test_the_batch_knows_what_its_requests_need(params, all_greedy, needs_processing):
    batch = SamplingBatch([request(**params)], 10, "cpu")
    assert (batch.all_greedy, batch.needs_processing) == (all_greedy, needs_processing)


@pytest.mark.parametrize("vocab_size", [7, 64, 4099, 50_257])
def test_greedy_ties_go_to_the_lowest_id(vocab_size):
    batch = SamplingBatch([request(temperature=0)] * 3, vocab_size, "cpu")
    for low, high in [(0, vocab_size - 1), (3, 5), (vocab_size // 2, vocab_size // 2 + 1)]:
        logits = torch.full((3, vocab_size), -1.0)
        logits[:, [low, high]] = 2.0
        assert batch.sample(logits, [0, 1, 2], [0, 0, 0])[0].tolist() == [low] * 3


def hostile_rows(vocab_size):
    """Rows of logits with ties, infinities and NaN, wherever a slice of a kernel may begin or end."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(-3, 4, (24, vocab_size), generator=generator).float()
    nan, inf = float("nan"), float("inf")
    places = [0, 1, vocab_size // 2, vocab_size - 1]
    for row, place in enumerate(places):
        rows[row, place] = nan
        rows[4 + row, place] = -nan
        rows[8 + row, :] = -inf
        rows[8 + row, place] = -1e-42 if row % 2 else -3e38
        rows[12 + row, place:] = inf
        rows[16 + row, :] = -0.0
        rows[16 + row, place] = 0.0
    rows[20] = -inf
    rows[21] = nan
    rows[22] = -inf
    rows[22, 5] = nan
    return rows


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # of rows that only fill a tile
@pytest.mark.parametrize("vocab_size", [7, 700])
def test_whoever_decides_a_greedy_token_decides_alike(vocab_size):
    """Alone the output layer may take the argmax; beside a mate who asks for more, a sampling batch does."""
    logits = hostile_rows(vocab_size)
    expected = [Argmax.of(row[None]) for row in logits]
    num_ok = sum(bool(ok) for _, ok in expected)
    assert 0 < num_ok < len(logits)
    for row, (token_ids, ok) in zip(logits, expected, strict=True):
        if ok:
            assert token_ids.item() == (row == row.max()).nonzero()[0].item()
        assert ok.item() == (not row.isnan().any() and bool(row.max() > float("-inf")))
    everybody, none_seen = list(range(len(logits))), [0] * len(logits)
    deciders = {"their argmax": Argmax.of(logits)}
    for backend in ("torch", "triton"):
        for name, temperature in (("alone", 0), ("beside a mate", 1)):
            requests = [request(temperature=0) for _ in logits] + [request(temperature=temperature)]
            batch = get_sampling_batch(backend)(requests, vocab_size, "cpu")
            rows = torch.cat([logits, torch.zeros(1, vocab_size)])
            processed = batch.process(rows, [*everybody, len(logits)], [*none_seen, 0], [[]] * len(requests))
            found = batch.sample(processed, [*everybody, len(logits)], [*none_seen, 0])
            deciders[f"{backend}, {name}"] = [values[:-1] for values in found]
    x = torch.zeros(1, 16)
    x[0, 0] = 1
    weights = torch.zeros(len(logits), vocab_size, 16)
    weights[:, :, 0] = logits
    fused = [lm_head(x, weight) for weight in weights]
    deciders["the output layer"] = [torch.cat(values) for values in zip(*fused, strict=True)]
    for name, (token_ids, ok) in deciders.items():
        assert ok.tolist() == [bool(ok) for _, ok in expected], name
        assert token_ids[ok].tolist() == [token_id.item() for token_id, ok in expected if ok], name


@settings(max_examples=150)
@given(st.lists(rows_of_logits(), min_size=1, max_size=5), st.integers(0, 2**32))
def test_the_kernel_chooses_what_is_processed_and_sampled(drawn, seed):
    logits = torch.tensor([row_logits for row_logits, _ in drawn])
    requests = [replace(row.request, seed=seed + i) for i, (_, row) in enumerate(drawn)]
    drafts = [row.drafts for _, row in drawn]
    rows, seen = list(range(len(drawn))), list(map(len, drafts))
    classes = [get_sampling_batch(backend) for backend in ("torch", "cpp")]
    assert classes[0] is not classes[1]
    expected, found = (
        of_backend(requests, V, "cpu").choose(logits.clone(), rows, seen, drafts, wants_logprobs=True)
        for of_backend in classes
    )
    assert found.ok.tolist() == expected.ok.tolist()
    assert found.token_ids[found.ok].tolist() == expected.token_ids[found.ok].tolist()
    assert found.logprobs[found.ok].tolist() == pytest.approx(expected.logprobs[found.ok].tolist(), abs=2e-5)


@pytest.mark.parametrize("vocab_size", [7, 700])
def test_of_hostile_rows_the_kernel_chooses_alike(vocab_size):
    logits = hostile_rows(vocab_size)
    rows, none_seen = list(range(len(logits))), [0] * len(logits)
    for params in ({}, {"temperature": 0}, {"temperature": 0.7, "top_k": 3}, {"top_p": 0.8, "min_p": 0.1}):
        requests = [request(seed=i, **params) for i in rows]
        expected, found = (
            get_sampling_batch(backend)(requests, vocab_size, "cpu").choose(logits, rows, none_seen, [[]] * len(rows))
            for backend in ("torch", "cpp")
        )
        assert found.ok.tolist() == expected.ok.tolist()
        assert found.token_ids[found.ok].tolist() == expected.token_ids[found.ok].tolist()


def test_greedy_rows_get_no_noise_beside_sampled_ones():
    logits = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    requests = [request(seed=i, temperature=0 if i % 2 else 1.0) for i in range(40)]
    ids, ok = SamplingBatch(requests, 50, "cpu").sample(logits, list(range(40)), [0] * 40)
    argmax = logits.argmax(-1)
    assert torch.equal(ids[1::2], argmax[1::2])
    assert not torch.equal(ids[::2], argmax[::2])
    assert bool(ok.all())


def test_sampling_follows_the_softmax_of_the_processed_logits():
    probs = [0.4, 0.3, 0.15, 0.1, 0.05, 0.0]
    logits = torch.tensor([[math.log(p) if p else float("-inf") for p in probs]]).expand(8000, -1)
    for temperature in (1.0, 0.5):
        requests = [request(seed=i, outputs=[0] * (i % 3), temperature=temperature) for i in range(8000)]
        batch = SamplingBatch(requests, 6, "cpu")
        rows, seen = list(range(8000)), [0] * 8000
        ids, _ = batch.sample(batch.process(logits, rows, seen, [[]] * 8000), rows, seen)
        counts = torch.bincount(ids, minlength=6)
        expected = torch.tensor(probs) ** (1 / temperature)
        expected = expected / expected.sum() * 8000
        assert counts[5] == 0
        assert ((counts - expected) ** 2 / expected)[:5].sum() < 23.5  # 4 degrees of freedom, p = 1e-4


def test_one_seeds_draws_along_the_output_follow_the_softmax_too():
    probs = torch.tensor([0.4, 0.3, 0.2, 0.1])
    batch = SamplingBatch([request(seed=7)], 4, "cpu")
    ids, _ = batch.sample(probs.log().expand(5000, -1), [0] * 5000, list(range(5000)))
    expected = probs * 5000
    assert ((torch.bincount(ids, minlength=4) - expected) ** 2 / expected).sum() < 21.1  # 3 degrees, p = 1e-4
    pairs = torch.bincount(ids[:-1] * 4 + ids[1:], minlength=16)
    expected = (probs.unsqueeze(1) * probs).flatten() * 4999
    assert ((pairs - expected) ** 2 / expected).sum() < 44.3  # 15 degrees


def test_the_draft_models_rows_meet_the_targets_noise():
    # Drafting K = 3 one by one with the batch that verifies, or with one of its own: the same tokens.
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(0))
    drafting = SamplingBatch([request(seed=3, outputs=[1, 2])], 500, "cpu")
    drafts = [drafting.sample(logits[j : j + 1], [0], [j])[0].item() for j in range(3)]
    verifying = SamplingBatch([request(seed=3, outputs=[1, 2])], 500, "cpu")
    for batch in (drafting, verifying):
        assert batch.sample(logits, [0] * 4, [0, 1, 2, 3])[0].tolist()[:3] == drafts
    later = SamplingBatch([request(seed=3, outputs=[1, 2, drafts[0]])], 500, "cpu")
    assert later.sample(logits[1:2], [0], [0])[0].item() == drafts[1]


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_row_without_a_token_or_with_nan_is_not_ok(backend):
    logits = torch.zeros(4, 5)
    logits[1] = float("-inf")
    logits[2, 3] = float("nan")
    logits[3, 1] = float("inf")
    for temperature in (0, 1.0):
        batch = get_sampling_batch(backend)([request(temperature=temperature)] * 4, 5, "cpu")
        ids, ok = batch.sample(logits, [0, 1, 2, 3], [0] * 4)
        assert ok.tolist() == [True, False, False, True]
        assert ids[3] == 1
        assert bool(((ids >= 0) & (ids < 5)).all())


def test_probs_are_the_distribution_that_is_sampled_from():
    processed = torch.tensor([[0.0, math.log(3), float("-inf")]])
    assert SamplingBatch([], 3, "cpu").probs(processed)[0].tolist() == pytest.approx([0.25, 0.75, 0.0])
