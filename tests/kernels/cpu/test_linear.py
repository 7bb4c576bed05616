"""The C++ linear layer: right, and the same bits for a row whatever rows are beside it."""

import pytest
import torch
import torch.nn.functional as F

from specpaged_kernels.cpu import linear as cpu_linear
from specpaged_kernels.cpu.build import load
from specpaged_kernels.cpu.library import SOURCE, why_not
from specpaged_kernels.cpu.linear import ARGUMENTS, PANEL, STORAGE, linear, pack
from tests.kernels.cpu.lanes import load_with_other_lanes

DTYPES = [torch.float32, torch.bfloat16]
# [N, K]: panels that fill a task or do not, and none, one and several blocks of K.
SHAPES = [(16, 8), (48, 33), (50, 256), (1, 7), (264, 256), (40, 300), (129, 1000), (20, 0)]
NARROW = [torch.bfloat16, *([torch.float16] if load(SOURCE).converts_float16() else [])]

# A library's function, its arithmetic, and how weights are stored.
WAYS = [
    ("linear_float32", torch.float32, torch.float32),
    ("linear_float32", torch.float32, torch.float16),
    ("linear_float32", torch.float32, torch.bfloat16),
    ("linear_bfloat16", torch.bfloat16, torch.bfloat16),
]


def sample(n: int, k: int, rows: int, dtype: torch.dtype, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator).to(dtype)
    weight = (torch.randn(n, k, generator=generator) / k**0.5).to(dtype)
    return x, weight, torch.randn(n, generator=generator).to(dtype)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 6, 7, 13, 50])
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
    x, weight, bias = sample(n, k, 100, dtype)  # two groups of rows, whose sums wait side by side
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


@pytest.mark.parametrize("stored", NARROW)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_weights_stored_in_16_bits_give_the_bits_of_the_same_weights_in_32(n, k, stored):
    x, weight, bias = sample(n, k, 130, torch.float32)  # for many tiles, weights are converted first
    packed = pack(weight.to(stored).float())
    assert packed.dtype == stored or k == 0  # which any dtype holds
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_linear, "stored_dtype", lambda weight: weight.dtype)
        wide = pack(weight.to(stored).float())
    assert wide.dtype == torch.float32
    for rows in (1, 2, 3, 4, 5, 6, 7, 13, 50, 130):
        expected = linear(x[:rows], wide, bias, n)
        assert torch.equal(linear(x[:rows], packed, bias, n), expected), rows


def test_weights_that_16_bits_cannot_hold_stay_as_they_are():
    weight = sample(16, 8, 1, torch.float32)[1].half().float()
    weight[3, 5] = 1.0 + 2.0**-20
    assert pack(weight).dtype == torch.float32
    weight[3, 5] = float("nan")  # which equals nothing
    assert pack(weight).dtype == torch.float32


@pytest.mark.skipif(torch.float16 not in NARROW, reason="this CPU does not convert float16: weights stay float32")
def test_every_float16_is_the_float32_that_it_stands_for():
    """Subnormal numbers, infinities and both zeros among them."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16)
    every = every[~every.isnan()]
    packed = F.pad(every, (0, -len(every) % PANEL)).view(-1, 1, PANEL)
    for rows in (1, 7):
        got = linear(torch.ones(rows, 1), packed, None, len(every))
        # 0 + -0 * 1 is +0.
        assert all(torch.equal((row + 0.0).view(torch.int32), (every.float() + 0.0).view(torch.int32)) for row in got)


def test_sixteen_lanes_give_the_bits_of_eight(tmp_path):
    """And float16 is converted alike by instructions, which not every CPU has, and by our own code."""
    libraries = load(SOURCE), load_with_other_lanes(tmp_path, "linear", before="#undef __F16C__\n")
    for name, dtype, stored in WAYS:
        for n, k in SHAPES:
            for rows in (1, 2, 3, 4, 5, 7, 9, 12, 13, 50):
                x, weight, bias = sample(n, k, rows, dtype)
                weight = weight.to(stored).to(dtype)
                packed, outputs = pack(weight), torch.empty(2, rows, n, dtype=dtype)
                for library, y in zip(libraries, outputs, strict=True):
                    function = getattr(library, name)
                    function.argtypes = ARGUMENTS
                    weights = (packed.data_ptr(), STORAGE[packed.dtype], bias.data_ptr())
                    assert function(x.data_ptr(), k, rows, *weights, k, n, y.data_ptr(), 1) == 0
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
    halves = pack(weight).view(2, 3, PANEL // 2, 2)  # small integers: bfloat16 holds them
    weight = weight + 2.0**-15
    packed = pack(weight)
    assert packed.shape == (2, 3, PANEL)
    assert torch.equal(packed[0, 1], weight[:PANEL, 1])
    assert packed[1, 2].tolist() == [weight[16, 2].item(), weight[17, 2].item()] + [0.0] * 14
    assert torch.equal(halves.transpose(2, 3).reshape(2, 3, PANEL).float(), packed.floor())


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
