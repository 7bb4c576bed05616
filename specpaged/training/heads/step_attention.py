"""Attention of heads in steps, with a gradient of its own: one matrix of weights is held, most masked work left out.

Dimensions: B sequences, H heads of D, T rows of step 0, R <= T the last rows of those, which are asked about.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

BLOCK = 128  # rows that are computed together: those behind the last of them are left out


def step_attention(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """[B, H, R, D] -> [B, H, R, D]: softmax of scaled scores, applied to values.

    `keys[0]` and `values[0]` [B, H, T, D] are those of step 0, of which row r (the T - R + r-th of them) reads the rows
    up to its own. Those of later steps are [B, H, R, D], and row r reads row r alone:

        step 0: T = 4, R = 2     steps 1, 2
        row 0    x x x .          x .   x .
        row 1    x x x x          . x   . x
    """
    query = query * query.shape[-1] ** -0.5
    with torch.autocast(query.device.type, enabled=False):  # the gradient is made outside of any
        return _StepAttention.apply(query.float(), len(keys), *(tensor.float() for tensor in (*keys, *values)))


class _StepAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, num_steps: int, *tensors: Tensor) -> Tensor:
        keys, values = tensors[:num_steps], tensors[num_steps:]
        first, num_rows = keys[0].shape[2] - query.shape[2], query.shape[2]
        own = [(query * key).sum(-1) for key in keys[1:]]  # [B, H, R] each
        own = torch.stack(own, -1) if own else query.new_empty(*query.shape[:3], 0)
        outputs, weights = [], []
        for start in range(0, num_rows, BLOCK):
            end = min(start + BLOCK, num_rows)
            scores = query[:, :, start:end] @ keys[0][:, :, : first + end].mT
            scores += _mask(end - start, first + end, scores)
            beside = own[:, :, start:end]
            most = scores.amax(-1, keepdim=True)
            if num_steps > 1:
                most = torch.maximum(most, beside.amax(-1, keepdim=True))
            scores.sub_(most).exp_()
            beside = (beside - most).exp_()
            total = scores.sum(-1, keepdim=True) + beside.sum(-1, keepdim=True)
            scores.div_(total)
            own[:, :, start:end] = beside / total
            weights.append(scores)
            outputs.append(scores @ values[0][:, :, : first + end])
        output = torch.cat(outputs, 2)
        for step, value in enumerate(values[1:]):
            output.addcmul_(own[..., step : step + 1], value)
        ctx.num_steps, ctx.first = num_steps, first
        ctx.save_for_backward(query, output, own, *keys, *values, *weights)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, output, own, *rest = ctx.saved_tensors
        keys, values = rest[: ctx.num_steps], rest[ctx.num_steps : 2 * ctx.num_steps]
        weights, num_rows = rest[2 * ctx.num_steps :], query.shape[2]
        delta = (grad * output).sum(-1, keepdim=True)  # [B, H, R, 1]: of each row, the weighted mean of d weights
        d_query = torch.empty_like(query)
        d_key, d_value = torch.zeros_like(keys[0]), torch.zeros_like(values[0])
        for block, start in zip(weights, range(0, num_rows, BLOCK), strict=True):
            end = min(start + BLOCK, num_rows)
            rows, width = slice(start, end), ctx.first + end
            d_scores = grad[:, :, rows] @ values[0][:, :, :width].mT
            d_value[:, :, :width] += block.mT @ grad[:, :, rows]
            d_scores.sub_(delta[:, :, rows]).mul_(block)
            d_query[:, :, rows] = d_scores @ keys[0][:, :, :width]
            d_key[:, :, :width] += d_scores.mT @ query[:, :, rows]
        d_keys, d_values = [d_key], [d_value]
        for step in range(1, ctx.num_steps):
            weight = own[..., step - 1 : step]
            d_own = ((grad * values[step]).sum(-1, keepdim=True) - delta) * weight
            d_query.addcmul_(d_own, keys[step])
            d_keys.append(d_own * query)
            d_values.append(weight * grad)
        return d_query, None, *d_keys, *d_values


def _mask(num_rows: int, width: int, like: Tensor) -> Tensor:
    """[num_rows, width]: -inf where a key stands behind a row; the last row is the last key."""
    return torch.full((num_rows, width), float("-inf"), dtype=like.dtype, device=like.device).triu(width - num_rows + 1)
