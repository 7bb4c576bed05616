"""RMS norms as one call."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FusedRMSNorm(nn.Module):
    """torch's rms_norm in place of a model's eight element-wise calls."""

    def __init__(self, weight: Tensor, eps: float):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps
        self._shape = tuple(weight.shape)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., H]"""
        return F.rms_norm(x, self._shape, self.weight, self.eps)


@torch.inference_mode()
def fused(norm: nn.Module, dtype: torch.dtype) -> FusedRMSNorm | None:
    """The same norm as one call; None where its results would have other bits, or it is no RMS norm."""
    weight = getattr(norm, "weight", None)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if "RMSNorm" not in type(norm).__name__ or weight is None or weight.dim() != 1 or not isinstance(eps, float):
        return None
    generator = torch.Generator(device=weight.device).manual_seed(0)
    samples = [
        (torch.randn(*shape, weight.shape[0], generator=generator, device=weight.device) * 3).to(dtype)
        for shape in ((1, 4), (1, 36), (1, 12, 3), (1, 64, 2))
    ]
    # Gemma's weights are stored less one.
    for candidate in (weight.detach(), weight.detach() + 1):
        new = FusedRMSNorm(candidate, eps)
        if all(torch.equal(new(x), norm(x)) for x in samples):
            return new
    return None


def fuse_norms(model: nn.Module, dtype: torch.dtype) -> None:
    """Replaces RMS norms, but only by ones with the same bits."""
    for path, module in list(model.named_modules()):
        new = fused(module, dtype)
        if new is not None:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, new)
