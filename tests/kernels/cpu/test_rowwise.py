"""The C++ row-wise operations against their references, and the same bits for a row whatever rows are beside it."""

import pytest
import torch

from specpaged_kernels.cpu.rowwise import (
    ACTIVATIONS,
    gate,
    gate_ref,
    norm_and_rotate,
    norm_and_rotate_ref,
    rms_norm,
    rms_norm_ref,
)

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7}


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 8, 31, 64, 256, 771])
def test_rms_norm(size, dtype, adds):
    x, weight = random(9, size, dtype=dtype), random(size, seed=1)
    added = random(9, size, dtype=dtype, seed=2) if adds else None
    ours, theirs = x.clone(), x.clone()
    got = rms_norm(ours, weight, 1e-5, added, 0.5)
    close(got, rms_norm_ref(theirs, weight, 1e-5, added, 0.5))
    close(ours, theirs)
    assert adds or torch.equal(ours, x), "without something to add, x is left alone"
    for start, rows in ((0, 1), (4, 3), (2, 7)):
        part = slice(start, start + rows)
        some = rms_norm(x[part].clone(), weight, 1e-5, None if added is None else added[part].clone(), 0.5)
        assert torch.equal(some, got[part])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("head_dim", "rotated"), [(32, 32), (16, 8), (24, 24), (20, 10), (20, 14), (64, 0)])
def test_norm_and_rotate(head_dim, rotated, has_norm, dtype):
    num_rows, heads, values = 7, 5, 2
    qkv = random(num_rows, heads + values, head_dim, dtype=dtype)
    weight = random(heads, head_dim, seed=1) if has_norm else None
    angles = random(num_rows, rotated // 2, seed=2) if rotated else None
    cosine, sine = (None, None) if angles is None else (angles.cos(), angles.sin())
    ours, theirs = qkv.clone(), qkv.clone()
    norm_and_rotate(ours, heads, weight, 1e-6, cosine, sine)
    norm_and_rotate_ref(theirs, heads, weight, 1e-6, cosine, sine)
    close(ours, theirs)
    assert torch.equal(ours[:, heads:], qkv[:, heads:]), "values are left alone"
    some = qkv[3:5].clone()
    norm_and_rotate(some, heads, weight, 1e-6, *(None if x is None else x[3:5].clone() for x in (cosine, sine)))
    assert torch.equal(some, ours[3:5])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 8, 21, 96])
def test_gate(size, dtype, activation):
    gate_up = random(6, 2 * size, dtype=dtype)
    got = gate(gate_up, activation)
    close(got, gate_ref(gate_up, activation))
    assert torch.equal(gate(gate_up[2:5].clone(), activation), got[2:5])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_far_from_zero(activation):
    gates = torch.tensor([[-1e30, -200.0, -90.0, -0.0, 0.0, 90.0, 200.0, 1e30, float("nan")]])
    got = gate(torch.cat([gates, torch.ones_like(gates)], dim=1), activation)[0]
    assert got[:5].abs().max() == 0
    assert torch.equal(got[5:8], gates[0, 5:8])
    assert got[8].isnan()
