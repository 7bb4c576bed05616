"""The C++ linear layer: right, and the same bits for a row whatever rows are beside it."""

import shutil

import pytest
import torch

from specpaged_kernels.cpu.build import CACHE, load
from specpaged_kernels.cpu.library import SOURCE, why_not
from specpaged_kernels.cpu.linear import ARGUMENTS, PANEL, linear, pack

DTYPES = [torch.float32, torch.bfloat16]
# [N, K]: panels that fill a task or do not, and one, two and four blocks of K.
SHAPES = [(16, 8), (48, 33), (50, 256), (1, 7), (264, 256), (129, 1000)]


def sample(n: int, k: int, rows: int, dtype: torch.dtype, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator).to(dtype)
    weight = (torch.randn(n, k, generator=generator) / k**0.5).to(dtype)
    return x, weight, torch.randn(n, generator=generator).to(dtype)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 13, 50])
def test_it_is_the_product_rounded_once(n, k, rows, dtype, has_bias):
    x, weight, bias = sample(n, k, rows, dtype)
    bias = bias if has_bias else None
    got = linear(x, pack(weight), bias, n)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert got.shape == (rows, n)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_row_has_the_same_bits_among_any_rows_on_any_threads(n, k, dtype):
    x, weight, bias = sample(n, k, 100, dtype)  # three groups of rows, whose sums wait side by side
    packed = pack(weight)
    expected = linear(x, packed, bias, n)
    for rows in [*range(1, 20), 24, 25, 48, 49]:
        start = 3 * rows % 50
        assert torch.equal(linear(x[start : start + rows], packed, bias, n), expected[start : start + rows]), rows
    torch.set_num_threads(2)
    try:
        assert torch.equal(linear(x, packed, bias, n), expected)
    finally:
        torch.set_num_threads(1)


def test_sixteen_lanes_give_the_bits_of_eight(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE, str(tmp_path / "built"))
    libraries = []
    for path in [SOURCE.with_name("linear.cpp"), *SOURCE.parent.glob("*.h")]:
        shutil.copy(path, tmp_path)
    for lanes in (8, 16):
        source = tmp_path / f"linear_{lanes}.cpp"
        source.write_text(f'#define WIDE_LANES {lanes}\n#include "linear.cpp"\n')
        libraries.append(load(source))
    for name, dtype in (("linear_float32", torch.float32), ("linear_bfloat16", torch.bfloat16)):
        for n, k in SHAPES:
            for rows in (1, 2, 3, 4, 5, 7, 9, 12, 13, 50):
                x, weight, bias = sample(n, k, rows, dtype)
                packed, outputs = pack(weight), torch.empty(2, rows, n, dtype=dtype)
                for library, y in zip(libraries, outputs, strict=True):
                    function = getattr(library, name)
                    function.argtypes = ARGUMENTS
                    arguments = (x.data_ptr(), k, rows, packed.data_ptr(), bias.data_ptr(), k, n, y.data_ptr(), 1)
                    assert function(*arguments) == 0
                assert torch.equal(outputs[0], outputs[1]), (name, n, k, rows)


def test_rows_may_lie_apart():
    x, weight, bias = sample(32, 24, 10, torch.float32)
    wide = torch.full((10, 50), float("nan"))
    wide[:, 5:29] = x
    assert torch.equal(linear(wide[:, 5:29], pack(weight), bias, 32), linear(x, pack(weight), bias, 32))


def test_a_nan_stays_in_its_row():
    x, weight, bias = sample(20, 16, 9, torch.float32)
    expected = linear(x, pack(weight), bias, 20)
    x[4, 3] = float("nan")
    got = linear(x, pack(weight), bias, 20)
    assert got[4].isnan().all()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(got[others], expected[others])


def test_the_packed_layout_holds_outputs_side_by_side():
    weight = torch.arange(18 * 3).float().view(18, 3)
    packed = pack(weight)
    assert packed.shape == (2, 3, PANEL)
    assert torch.equal(packed[0, 1], weight[:PANEL, 1])
    assert packed[1, 2].tolist() == [weight[16, 2].item(), weight[17, 2].item()] + [0.0] * 14


def test_columns_may_lie_apart():
    x, weight, bias = sample(32, 24, 10, torch.float32)
    assert torch.equal(linear(x.T.contiguous().T, pack(weight), bias, 32), linear(x, pack(weight), bias, 32))


@pytest.mark.parametrize(
    ("n", "dtype", "k"), [(32, torch.bfloat16, 24), (32, torch.float32, 23), (49, torch.float32, 24)]
)
def test_what_does_not_fit_the_weight_is_refused(n, dtype, k):
    x, weight, _ = sample(32, 24, 10, torch.float32)
    with pytest.raises(ValueError, match=r"(x|packed) is \[.*; allowed: \["):
        linear(x[:, :k].to(dtype), pack(weight), None, n)


def test_a_dtype_that_it_lacks_is_named():
    assert "float16" in why_not(torch.float16)
