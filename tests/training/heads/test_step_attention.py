"""Attention in steps against one row at a time, and its gradient against autograd's."""

from __future__ import annotations

import pytest
import torch

from specpaged.training.heads import step_attention as module
from specpaged.training.heads.step_attention import step_attention


def naive(query, keys, values):
    """Row by row, over the keys that it may read."""
    first = keys[0].shape[2] - query.shape[2]
    rows = []
    for row in range(query.shape[2]):
        read = slice(0, first + row + 1)
        k = torch.cat([keys[0][:, :, read], *(key[:, :, row : row + 1] for key in keys[1:])], 2)
        v = torch.cat([values[0][:, :, read], *(value[:, :, row : row + 1] for value in values[1:])], 2)
        weights = (query[:, :, row : row + 1] @ k.mT * query.shape[-1] ** -0.5).softmax(-1)
        rows.append(weights @ v)
    return torch.cat(rows, 2)


@pytest.mark.parametrize("block", [2, 3, 128])
@pytest.mark.parametrize(("num_steps", "first"), [(1, 0), (1, 2), (3, 0), (4, 2)])
def test_values_and_gradients_equal_those_of_rows_one_by_one(monkeypatch, block, num_steps, first):
    monkeypatch.setattr(module, "BLOCK", block)
    torch.manual_seed(num_steps)
    shape = (2, 3, 7 - first, 4)
    query = torch.randn(shape, dtype=torch.float32, requires_grad=True)
    shapes = [(2, 3, 7, 4), *[shape] * (num_steps - 1)]
    keys, values = ([torch.randn(each, requires_grad=True) for each in shapes] for _ in range(2))
    weight = torch.randn(shape)
    inputs = [query, *keys, *values]
    results = []
    for attend in (step_attention, naive):
        output = attend(query, keys, values)
        results.append((output, *torch.autograd.grad((output * weight).sum(), inputs)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
