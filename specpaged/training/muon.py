"""Muon: momentum whose update is orthogonalised (Jordan 2024, https://kellerjordan.github.io/posts/muon).

`torch.optim.Muon` orthogonalises in bfloat16, one matrix at a time: slow on a CPU without bfloat16 units.
"""

from collections import defaultdict
from concurrent.futures import Executor

import torch
from torch import Tensor
from typing_extensions import override


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz: [n, rows, columns] float32 -> same shape, singular values near 1 (0.7 to 1.2)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + torch.baddbmm(b * gram, gram, gram, alpha=c) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, with decoupled weight decay; every parameter is a matrix.

    Matrices of one shape (or its transpose) are orthogonalised together, `chunk` at a time, on `pool`.
    """

    def __init__(self, params, lr=0.02, momentum=0.95, weight_decay=0.0, pool: Executor | None = None, chunk: int = 8):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.pool, self.chunk = pool, chunk

    @override
    @torch.no_grad()
    def step(self, closure=None) -> None:
        """One update from the parameters' `.grad`."""
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for p in group["params"]:
                by_shape[tuple(sorted(p.shape))].append(p)
            size = self.chunk
            chunks = [ps[i : i + size] for ps in by_shape.values() for i in range(0, len(ps), size)]
            each = self.pool.map if self.pool else map
            list(each(self._update, chunks, [group] * len(chunks)))

    @torch.no_grad()
    def _update(self, params: list[Tensor], group: dict) -> None:
        directions = []
        for p in params:
            state = self.state[p]
            momentum = state.setdefault("momentum", torch.zeros_like(p))
            momentum.lerp_(p.grad, 1 - group["momentum"])
            direction = p.grad.lerp(momentum, group["momentum"])
            directions.append(direction.mT if p.shape[0] > p.shape[1] else direction)
        for p, update in zip(params, orthogonalise(torch.stack(directions)), strict=True):
            rows, columns = p.shape
            p.mul_(1 - group["lr"] * group["weight_decay"])
            rate = group["lr"] * max(1, rows / columns) ** 0.5
            p.add_(update.mT if rows > columns else update, alpha=-rate)
