"""The exact linear, in Triton's interpreter: right, and the same bits in any number of rows."""

import pytest
import torch

from specpaged_kernels.linear import MAX_SPLIT_ROWS, Tiles, choose_tiles, linear, linear_ref


def small_tiles(num_rows: int) -> Tiles:
    """Splits, tails of every dimension and both ways of summing, in a small test."""
    return Tiles(128 if num_rows > MAX_SPLIT_ROWS else 64, 32, 16, 48, 4, 1)


def operands(num_rows, out_features, in_features, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, weight, bias = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in ((num_rows, in_features), (out_features, in_features), (out_features,))
    )
    return x, weight / in_features**0.5, bias


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "out_features", "in_features"), [(1, 40, 40), (6, 70, 130), (65, 33, 100)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_kernel_equals_its_reference(num_rows, out_features, in_features, dtype, has_bias):
    x, weight, bias = operands(num_rows, out_features, in_features, dtype)
    bias = bias if has_bias else None
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    got = linear(x, weight, bias, small_tiles(num_rows))
    torch.testing.assert_close(got, linear_ref(x, weight, bias), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_is_bitwise_the_same_in_any_number_of_rows(dtype):
    x, weight, bias = operands(80, 70, 130, dtype)
    together = linear(x, weight, bias, small_tiles(80))  # one program goes through the splits
    for start, stop in ((0, 1), (7, 8), (5, 11), (16, 80), (79, 80)):
        alone = linear(x[start:stop], weight, bias, small_tiles(stop - start))
        assert torch.equal(alone, together[start:stop])


def test_splits_follow_from_the_weights_shape_alone():
    for out_features, in_features in ((4096, 4096), (1024, 4096), (12288, 4096), (4096, 12288), (151936, 4096)):
        by_rows = [choose_tiles(m, out_features, in_features, torch.bfloat16) for m in (1, 6, 64, 65, 4096)]
        assert len({(t.block_k, t.split_len) for t in by_rows}) == 1
        assert by_rows[0].split_len % by_rows[0].block_k == 0
    assert choose_tiles(1, 4096, 4096, torch.bfloat16).split_len < 4096  # few tiles: several splits
