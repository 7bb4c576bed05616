"""Muon's updates are orthogonal matrices, whatever the shape and the batch."""

import pytest
import torch

from specpaged.training.muon import Muon, orthogonalise


@pytest.mark.parametrize("shape", [(3, 32, 32), (2, 16, 64), (2, 64, 16)])
def test_singular_values_are_near_one(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    matrices[0] *= 1000
    values = torch.linalg.svdvals(orthogonalise(matrices, steps=6))
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_orthogonalising_keeps_the_singular_vectors():
    matrix = torch.randn(1, 8, 24, generator=torch.Generator().manual_seed(0))
    u, _, v = torch.linalg.svd(matrix[0], full_matrices=False)
    core = u.T @ orthogonalise(matrix, steps=6)[0] @ v.T
    assert (core - torch.diag(core.diag())).abs().max() < 1e-3


def test_batched_step_equals_one_matrix_at_a_time():
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 16), (16, 8), (8, 8), (8, 16)]
    start = [torch.randn(s, generator=generator) for s in shapes]
    grads = [torch.randn(s, generator=generator) for s in shapes]

    def step(chunk):
        params = [p.clone().requires_grad_() for p in start]
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        Muon(params, lr=0.1, weight_decay=0.1, chunk=chunk).step()
        return params

    for together, alone, before in zip(step(8), step(1), start, strict=True):
        torch.testing.assert_close(together, alone)
        assert (together - before).abs().max() > 0.01
