"""The norm kernel, in Triton's interpreter."""

import pytest
import torch

from specpaged_kernels.rms_norm import rms_norm, rms_norm_ref


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "size"), [(1, 64), (5, 100), (3, 1)])
@pytest.mark.parametrize("with_residual", [False, True])
def test_kernel_equals_its_reference(dtype, num_rows, size, with_residual):
    generator = torch.Generator().manual_seed(size)
    x, residual = (torch.randn(num_rows, size, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(size, generator=generator).to(dtype)
    residuals = [residual.clone(), residual.clone()] if with_residual else [None, None]
    got = rms_norm(x, weight, 1e-6, residuals[0], weight_offset=1.0)
    expected = rms_norm_ref(x, weight, 1e-6, residuals[1], weight_offset=1.0)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    if with_residual:  # the interpreter cuts a bfloat16 where a device rounds it
        torch.testing.assert_close(*residuals, rtol=2**-7 if dtype == torch.bfloat16 else 0, atol=0)


def test_a_row_is_bitwise_the_same_among_others():
    x, weight = torch.randn(7, 96), torch.randn(96)
    together = rms_norm(x, weight, 1e-6)
    for row in range(7):
        assert torch.equal(rms_norm(x[row : row + 1], weight, 1e-6)[0], together[row])
