"""Clover's attention in Triton's interpreter."""

import pytest
import torch

from specpaged_kernels.res_attention import res_attention, res_attention_ref


def inputs(num_rows, size, dtype=torch.float32):
    generator = torch.Generator().manual_seed(size)
    widths = (size, size, 2 * size, size)
    return [torch.randn(num_rows, width, generator=generator).to(dtype) for width in widths]


def test_a_head_adds_its_value_as_far_as_query_and_key_point_the_same_way():
    """Two heads of 2: the first one's query and key are parallel, the second one's at right angles."""
    x, query = torch.tensor([[1.0, 2, 3, 4]]), torch.tensor([[2.0, 0, 0, 5]])
    key_value = torch.tensor([[3.0, 0, 7, 0, 10, 20, 30, 40]])
    for attention in (res_attention, res_attention_ref):
        assert attention(x, query, key_value, 2, 1e-6).tolist() == [[11, 22, 3, 4]]
        assert attention(x, query, key_value, 2, 1e-6, x).tolist() == [[11, 22, 3, 4, 1, 2, 3, 4]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "size", "num_heads"), [(1, 64, 2), (5, 96, 8), (3, 200, 1)])
@pytest.mark.parametrize("has_embedded", [False, True])
def test_kernel_equals_its_reference(dtype, num_rows, size, num_heads, has_embedded):
    x, query, key_value, embedded = inputs(num_rows, size, dtype)
    query[0] = 0  # has no direction
    embedded = embedded if has_embedded else None
    got = res_attention(x, query, key_value, num_heads, 1e-6, embedded)
    expected = res_attention_ref(x, query, key_value, num_heads, 1e-6, embedded)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def test_a_row_is_bitwise_the_same_among_others_and_rows_may_be_parts_of_wider_ones():
    x, query, key_value, embedded = inputs(7, 96)
    together = res_attention(x, query, key_value, 4, 1e-6, embedded)
    wide = torch.cat((x, query), dim=-1)
    assert torch.equal(res_attention(wide[:, :96], wide[:, 96:], key_value, 4, 1e-6, embedded), together)
    for row in range(7):
        alone = res_attention(
            *(part[row : row + 1] for part in (x, query, key_value)), 4, 1e-6, embedded[row : row + 1]
        )
        assert torch.equal(alone[0], together[row])
