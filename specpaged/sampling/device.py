"""Sampling by the kernel: noise is made where it is added, and never stored."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from typing_extensions import override

from specpaged.sampling.batch import SamplingBatch
from specpaged_kernels.accept import sample


class KernelSamplingBatch(SamplingBatch):
    """A SamplingBatch that samples with the kernel."""

    @override
    def sample(
        self,
        processed: Tensor,  # [M, V] fp32
        request_idx: Sequence[int],
        num_drafts_seen: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        return sample(processed, self.noise_keys(request_idx, num_drafts_seen))

    @override
    def draw_noise(self, request_idx: Sequence[Sequence[int]]) -> None:
        """Nothing to do: the kernel makes noise where it adds it."""
