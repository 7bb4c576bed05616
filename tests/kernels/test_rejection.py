"""Rejection sampling on the device, in Triton's interpreter, against its reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specpaged.sampling import noise
from specpaged_kernels.rejection import reject, reject_ref


def run_both(logits, drafts, draft_probs, draws, seed=0, uniforms=None):
    """(kernel's, reference's) on ragged drafts."""
    num_rows, vocab_size = logits.shape
    counts = [len(ids) for ids in drafts]
    padded = torch.zeros(len(drafts), max([*counts, 1]), dtype=torch.int64)
    for row, ids in zip(padded, drafts, strict=True):
        row[: len(ids)] = torch.tensor(ids, dtype=torch.int64)
    cu_rows = torch.tensor([0] + [k + 1 for k in counts]).cumsum(0).to(torch.int32)
    seeds, indices = [seed] * num_rows, list(range(num_rows))
    if uniforms is None:
        uniforms = torch.tensor([noise.uniform(seed, i, noise.ACCEPT) for i in indices], dtype=torch.float64)
    keys = noise.noise_keys(seeds, indices, "cpu")
    keys[:, 3] = draws
    recover_keys = noise.noise_keys(seeds, indices, "cpu", noise.RECOVER)
    values = noise.gumbel_noise(seeds, indices, vocab_size, "cpu") * draws[:, None]
    recover_values = noise.gumbel_noise(seeds, indices, vocab_size, "cpu", noise.RECOVER)
    got = reject(logits, padded, cu_rows, draft_probs, uniforms, keys, recover_keys)
    expected = reject_ref(logits, padded, cu_rows, draft_probs, uniforms, values, draws, recover_values)
    for name in ("num_outputs", "num_accepted", "ok"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    for ours, theirs, count in zip(got.token_ids, expected.token_ids, expected.num_outputs.tolist(), strict=True):
        assert torch.equal(ours[:count], theirs[:count])
    return got


def test_the_worked_example_of_the_docstring():
    target = torch.full((4, 10), 0.01)
    target[0, 5], target[1, 6] = 0.8, 0.1
    draft_probs = torch.full((3, 10), 0.01)
    draft_probs[0, 5], draft_probs[1, 6] = 0.4, 0.3
    target, draft_probs = (x / x.sum(-1, keepdim=True) for x in (target, draft_probs))
    uniforms = torch.tensor([0.7, 0.9, 0.5, 0.5], dtype=torch.float64)  # .9 x .3 is more than .1
    got = run_both(target.log(), [[5, 6, 7]], draft_probs, torch.ones(4, dtype=torch.bool), uniforms=uniforms)
    assert got.num_accepted.tolist() == [1]
    assert got.token_ids[0, 0] == 5
    assert got.token_ids[0, 1] != 6  # where the draft is the likelier, nothing is left


@settings(max_examples=15)
@given(data=st.data())
def test_kernel_equals_its_reference(data):
    vocab_size = data.draw(st.sampled_from([7, 1024, 8193]))
    counts = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    seed = data.draw(st.integers(0, 9999))
    generator = torch.Generator().manual_seed(seed)
    num_rows = sum(counts) + len(counts)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 2
    if data.draw(st.booleans()):
        logits[data.draw(st.integers(0, num_rows - 1))] = data.draw(st.sampled_from([float("nan"), float("-inf")]))
    draws = torch.repeat_interleave(
        torch.tensor([data.draw(st.booleans()) for _ in counts]), torch.tensor([k + 1 for k in counts])
    )
    rows = [r for b, k in enumerate(counts) for r in range(sum(counts[:b]) + b, sum(counts[:b]) + b + k)]
    apart = torch.randn(len(rows), vocab_size, generator=generator)
    draft_probs = (logits[rows].nan_to_num(0, 0, 0) + apart).softmax(-1)
    likely = (draft_probs.log() - torch.empty_like(draft_probs).exponential_(generator=generator).log()).argmax(-1)
    drafts = [part.tolist() for part in likely.split(counts)]
    certain = data.draw(st.booleans()) or not rows
    run_both(logits, drafts, None if certain else draft_probs, draws, seed)


@pytest.mark.parametrize("certain", [False, True])
def test_the_first_token_has_the_targets_distribution(certain):
    """By the reference, over many draws: 4 ids, and each frequency within four standard errors."""
    target, draft = torch.tensor([0.5, 0.2, 0.2, 0.1]), torch.tensor([0.1, 0.6, 0.2, 0.1])
    count = 2000
    generator = torch.Generator().manual_seed(1)
    drafts = (
        torch.full((count, 1), 1) if certain else torch.multinomial(draft, count, True, generator=generator)[:, None]
    )
    logits = target.log().expand(2 * count, 4)
    probs = None if certain else draft.expand(count, 4)
    cu_rows, rows = torch.arange(0, 2 * count + 1, 2, dtype=torch.int32), list(range(2 * count))
    uniforms = torch.tensor([noise.uniform(5, i, noise.ACCEPT) for i in rows], dtype=torch.float64)
    values, recover_values = (
        noise.gumbel_noise([5] * len(rows), rows, 4, "cpu", purpose) for purpose in (noise.SAMPLE, noise.RECOVER)
    )
    draws = torch.ones(len(rows), dtype=torch.bool)
    got = reject_ref(logits, drafts, cu_rows, probs, uniforms, values, draws, recover_values)
    frequencies = torch.bincount(got.token_ids[:, 0], minlength=4) / count
    assert ((frequencies - target).abs() < 4 * (target * (1 - target) / count).sqrt()).all()
    assert 0.1 < got.num_accepted.float().mean() < 0.7
