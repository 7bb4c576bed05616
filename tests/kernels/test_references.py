"""The references themselves, against the plainest statement of what they compute."""

import pytest
import torch

from specpaged_kernels.paged_attention import paged_attention_ref
from specpaged_kernels.store_kv import store_kv_ref


def test_store_writes_the_rows_it_is_given_slots_for_and_nothing_else():
    pool = torch.full((12, 2, 2, 4), float("nan"))
    keys, values = torch.randn(5, 2, 4), torch.randn(5, 2, 4)
    store_kv_ref(keys, values, pool, torch.tensor([7, 2, 11, 0, 0]), torch.tensor(3))
    assert torch.equal(pool[[7, 2, 11], 0], keys[:3])
    assert torch.equal(pool[[7, 2, 11], 1], values[:3])
    untouched = [slot for slot in range(12) if slot not in (7, 2, 11)]
    assert pool[untouched].isnan().all()


@pytest.mark.parametrize("window", [None, 3])
def test_reference_equals_dense_causal_attention_of_one_sequence(window):
    torch.manual_seed(0)
    length, block_size, heads, kv_heads, dim = 11, 4, 6, 2, 8
    query, keys, values = (torch.randn(length, h, dim) for h in (heads, kv_heads, kv_heads))
    pool = torch.full((5 * block_size, 2, kv_heads, dim), float("nan"))
    table = torch.tensor([[3, 1, 4]])
    slots = torch.tensor([int(table[0, p // block_size]) * block_size + p % block_size for p in range(length)])
    store_kv_ref(keys, values, pool, slots, torch.tensor(length))
    position = torch.arange(length)
    allowed = position[None] <= position[:, None]
    if window is not None:
        allowed &= position[None] > position[:, None] - window
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys.transpose(0, 1)[None].repeat_interleave(heads // kv_heads, 1),
        values.transpose(0, 1)[None].repeat_interleave(heads // kv_heads, 1),
        attn_mask=allowed,
    )[0].transpose(0, 1)
    # The last six tokens, after a context of five, with two filler rows.
    padded = torch.cat([query[5:], torch.full((2, heads, dim), float("nan"))])
    got = paged_attention_ref(padded, pool, table, torch.tensor([0, 6]), torch.tensor([5]), block_size, window=window)
    torch.testing.assert_close(got[:6], expected[5:], rtol=1e-5, atol=1e-6)
    assert torch.equal(got[6:], torch.zeros(2, heads, dim))


def test_softcap_and_sinks_by_hand():
    """One token, one key: weight = exp(s) / (exp(s) + exp(sink)) with s = softcap * tanh(q.k / softcap)."""
    pool = torch.zeros(2, 2, 1, 2)
    pool[1, 0, 0], pool[1, 1, 0] = torch.tensor([3.0, 0.0]), torch.tensor([1.0, -2.0])
    query = torch.tensor([[[2.0, 5.0]]])
    arguments = (query, pool, torch.tensor([[1]]), torch.tensor([0, 1]), torch.tensor([0]), 1)
    got = paged_attention_ref(*arguments, scaling=0.5, softcap=2.0, sinks=torch.tensor([0.25]))
    score = 2.0 * torch.tanh(torch.tensor(3.0 / 2.0))
    weight = score.exp() / (score.exp() + torch.tensor(0.25).exp())
    torch.testing.assert_close(got[0, 0], weight * pool[1, 1, 0])
