"""The output layer with a running argmax, in Triton's interpreter."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specpaged_kernels import lm_head as module
from specpaged_kernels.accept import sample
from specpaged_kernels.linear import Tiles, choose_tiles, linear
from specpaged_kernels.lm_head import lm_head, lm_head_ref

TILES = Tiles(64, 32, 16, 48, 4, 1)


def operands(num_rows, vocab_size, in_features, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, weight, bias = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in ((num_rows, in_features), (vocab_size, in_features), (vocab_size,))
    )
    return x, weight, bias


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_rows", "vocab_size", "in_features"), [(1, 33, 48), (7, 300, 100), (66, 64, 33)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_tokens_are_those_of_linear_and_an_argmax(dtype, num_rows, vocab_size, in_features, has_bias):
    x, weight, bias = operands(num_rows, vocab_size, in_features, dtype)
    bias = bias if has_bias else None
    logits = linear(x, weight, bias, TILES).float()
    token_ids, ok = lm_head(x, weight, bias, TILES)
    assert torch.equal(token_ids, sample(logits)[0])
    assert ok.all()


@pytest.mark.parametrize("max_slices", [512, 4])
def test_of_equals_the_lowest_id_wins_in_whatever_slice_and_tile_it_is(max_slices, monkeypatch):
    """With 512 slices each has one tile, with 4 each has several."""
    monkeypatch.setattr(module, "MAX_SLICES", max_slices)
    x = torch.randint(-2, 3, (9, 16), generator=torch.Generator().manual_seed(1)).float()
    weight = torch.randint(-1, 2, (700, 16), generator=torch.Generator().manual_seed(2)).float()
    weight[650:] = weight[:50]
    got, expected = lm_head(x, weight, tiles=TILES), lm_head_ref(x, weight)
    assert torch.equal(got[0], expected[0])
    assert (got[0] < 650).all()


def test_rows_with_nan_or_without_a_token_are_not_ok():
    x, weight, _ = operands(4, 70, 32, torch.float32)
    x[1, 3] = float("nan")
    weight[:, 0] = 1.0
    x[2] = 0
    x[2, 0] = float("-inf")
    for got in (lm_head(x, weight, tiles=TILES), lm_head_ref(x, weight)):
        assert got[1].tolist() == [True, False, False, True]
        assert got[0][1:3].tolist() == [0, 0]


def test_a_row_has_the_same_token_in_any_number_of_rows():
    x, weight, _ = operands(70, 130, 64, torch.float16)
    together = lm_head(x, weight, tiles=TILES)[0]
    for start, stop in ((0, 1), (5, 11), (69, 70)):
        assert torch.equal(lm_head(x[start:stop], weight, tiles=TILES)[0], together[start:stop])


@settings(max_examples=8)
@example(num_rows=70, num_ids=70, in_features=600, dtype=torch.float32, seed=0)  # in two splits, which are merged
@example(num_rows=5, num_ids=50, in_features=600, dtype=torch.float32, seed=1)  # which are programs of their own
@example(num_rows=5, num_ids=50, in_features=600, dtype=torch.bfloat16, seed=2)
@given(
    num_rows=st.sampled_from([1, 5, 70]),
    num_ids=st.integers(1, 70),
    in_features=st.just(96),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_one_argmax_whether_of_the_output_layer_or_of_logits(num_rows, num_ids, in_features, dtype, seed):
    """As a decoder's pass takes either, with each one's own tiles: ids that come twice, NaN, and rows without a token.

    What is not ok has the id 0 in both, so that no bit says which way a token came.
    """
    x, weight, _ = operands(num_rows, 70, in_features, dtype, seed)
    draw = torch.Generator().manual_seed(seed)
    weight = weight[torch.randint(0, 70, (70,), generator=draw)].contiguous()
    spoilt = torch.randint(0, 4, (num_rows,), generator=draw)
    x[spoilt == 1, 0] = float("nan")
    x[spoilt == 2] = 0
    from_logits = sample(linear(x, weight)[:, :num_ids].float())
    tiles = choose_tiles(1, *weight.shape, dtype)
    from_layer = lm_head(x, weight[:num_ids], tiles=tiles)
    for ours, theirs in zip(from_layer, from_logits, strict=True):
        assert torch.equal(ours, theirs)
