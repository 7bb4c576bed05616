"""New keys and values land in their slots and nowhere else."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specpaged_kernels.store_kv import store_kv, store_kv_ref

NUM_SLOTS = 40


@settings(max_examples=20)
@given(
    num_stored=st.integers(0, 6), filler=st.integers(0, 2), num_kv_heads=st.sampled_from([1, 2, 3]),
    head_dim=st.sampled_from([32, 40]), dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_kernel_equals_its_reference(num_stored, filler, num_kv_heads, head_dim, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    num_rows = num_stored + filler
    if num_rows == 0:
        return
    # As a model makes them: views of one projection, heads before tokens.
    projected = torch.randn(2 * num_kv_heads, num_rows, head_dim, generator=generator).to(dtype).transpose(0, 1)
    keys, values = projected[:, :num_kv_heads], projected[:, num_kv_heads:]
    slots = torch.randperm(NUM_SLOTS, generator=generator)[:num_rows]
    got, expected = (torch.full((NUM_SLOTS, 2, num_kv_heads, head_dim), float("nan"), dtype=dtype) for _ in range(2))
    store_kv(keys, values, got, slots, torch.tensor(num_stored, dtype=torch.int32))
    store_kv_ref(keys, values, expected, slots, torch.tensor(num_stored, dtype=torch.int32))
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())
    assert (~got.isnan()).sum() == num_stored * 2 * num_kv_heads * head_dim
