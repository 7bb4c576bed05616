"""The tokens that top_k and top_p keep: ties are broken by id, and no sum depends on its order."""

from __future__ import annotations

import torch
from torch import Tensor

from specpaged.sampling.elementwise import exp_weights


def keep_top(x: Tensor, top_k: Tensor, top_p: Tensor, first_width: int) -> Tensor:
    """[R, V] fp32, [R] int64 in 1..V, [R] float64 in (0, 1] -> [R, V] fp32: all but each row's top tokens are -inf.

    A token's probability is its weight floor(2^40 e^(x - max)) over the sum of the weights of the top k: integers, so
    that no sum depends on its order. Only values are sorted; ids matter among equals of the last value kept. The
    `first_width` largest are tried before the whole vocabulary is sorted: at least every top_k below V.
    """
    vocab_size = x.shape[1]
    width = min(vocab_size, first_width)
    num_keep, last, decided = _last_kept(x, top_k, top_p, width)
    if width < vocab_size and not bool(decided.all()):
        wide = (~decided).nonzero().squeeze(-1)
        num_keep[wide], last[wide], _ = _last_kept(x[wide], top_k[wide], top_p[wide], vocab_size)
    last = last.unsqueeze(-1)
    above, equal = x > last, x == last
    num_equal = num_keep - above.sum(dim=-1)
    keep = above | (equal & (equal.cumsum(dim=-1) <= num_equal.unsqueeze(-1)))
    return x.masked_fill(~keep, float("-inf"))


def _last_kept(x: Tensor, top_k: Tensor, top_p: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Per row: how many tokens stay, the value of the last of them, and whether `width` sorted values sufficed."""
    vocab_size = x.shape[1]
    values = x.topk(width, dim=-1).values
    ranks = torch.arange(width, device=x.device)
    row_max = values[:, :1]
    weights = exp_weights(values, row_max).masked_fill_(ranks >= top_k.unsqueeze(-1), 0)
    total = weights.sum(dim=-1)
    if width < vocab_size:
        unbounded = top_k > width
        if bool(unbounded.any()):
            total = torch.where(unbounded, exp_weights(x, row_max).sum(dim=-1), total)
    before = weights.cumsum(dim=-1) - weights
    num_top_p = (before.double() < (total.double() * top_p).unsqueeze(-1)).sum(dim=-1)
    num_top_p = torch.where(top_p < 1, num_top_p, vocab_size)
    num_keep = torch.minimum(num_top_p, top_k).clamp_(1)
    decided = (num_keep < width) | (num_keep == top_k) & (top_k <= width) | (width == vocab_size)
    last = values.gather(1, (num_keep - 1).clamp_(max=width - 1).unsqueeze(-1)).squeeze(-1)
    return num_keep, last, decided
