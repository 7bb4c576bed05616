"""RMS norms as one call."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specpaged.modeling.numerics import InexactError
from specpaged_kernels.limits import MAX_NORM_SIZE


class FusedRMSNorm(nn.Module):
    """torch's rms_norm in place of a model's eight element-wise calls."""

    def __init__(self, weight: Tensor, eps: float, offset: float):
        super().__init__()
        self.weight = nn.Parameter(weight + offset if offset else weight, requires_grad=False)
        self.eps = eps
        self._shape = tuple(weight.shape)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., H]"""
        return F.rms_norm(x, self._shape, self.weight, self.eps)


class KernelRMSNorm(nn.Module):
    """Our kernel: the order of a row's sum is a function of H alone, where torch's on a GPU is one of the rows too."""

    def __init__(self, weight: Tensor, eps: float, offset: float):
        super().__init__()
        from specpaged_kernels.rms_norm import rms_norm  # where it is wanted: defining kernels takes a second

        # A copy, as the kernel wants it aligned, and a mapped file's tensors lie anywhere.
        self.weight = nn.Parameter(weight.clone(), requires_grad=False)
        self.eps = eps
        self.offset = offset
        self._rms_norm = rms_norm

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., H]"""
        rows = x.reshape(-1, x.shape[-1])
        return self._rms_norm(rows, self.weight, self.eps, weight_offset=self.offset).view(x.shape)


def _close(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two results differ by two roundings at most, one before and one after the weight."""
    tolerance = 4 * torch.finfo(theirs.dtype).eps
    return torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance)


@torch.inference_mode()
def replacement(
    norm: nn.Module,
    dtype: torch.dtype,
    make: Callable[[Tensor, float, float], nn.Module],
    same: Callable[[Tensor, Tensor], bool],
) -> nn.Module | None:
    """The same norm made by `make`; None where its results are not the same, or it is no RMS norm."""
    weight = getattr(norm, "weight", None)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if "RMSNorm" not in type(norm).__name__ or weight is None or weight.dim() != 1 or not isinstance(eps, float):
        return None
    if len(weight) > MAX_NORM_SIZE:
        return None
    generator = torch.Generator(device=weight.device).manual_seed(0)
    samples = [
        (torch.randn(*shape, weight.shape[0], generator=generator, device=weight.device) * 3).to(dtype)
        for shape in ((1, 4), (1, 36), (1, 12, 3), (1, 64, 2))
    ]
    for offset in (0.0, 1.0):  # Gemma's weights are stored less one
        new = make(weight.detach(), eps, offset)
        if all(same(new(x), norm(x)) for x in samples):
            return new
    return None


def _replace_norms(model: nn.Module, dtype: torch.dtype, make: Callable, same: Callable) -> None:
    for path, module in list(model.named_modules()):
        new = replacement(module, dtype, make, same)
        if new is not None:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, new)


def fuse_norms(model: nn.Module, dtype: torch.dtype) -> None:
    """Replaces RMS norms, but only by ones with the same bits."""
    _replace_norms(model, dtype, FusedRMSNorm, torch.equal)


def use_kernel_norms(model: nn.Module, dtype: torch.dtype) -> None:
    """Replaces RMS norms by our kernel, which rounds once where a model may round twice. Raises InexactError."""
    _replace_norms(model, dtype, KernelRMSNorm, _close)
    for path, module in model.named_modules():
        if "RMSNorm" in type(module).__name__ and not isinstance(module, KernelRMSNorm):
            raise InexactError(
                f"numerics='exact' is not possible for this model in Triton's kernels: {path} "
                f"({type(module).__name__}) is no RMS norm with one weight of up to {MAX_NORM_SIZE}"
            )
