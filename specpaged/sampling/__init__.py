"""From logits to tokens: processing, noise, log-probabilities."""

from __future__ import annotations

from specpaged.sampling.batch import SamplingBatch


def get_sampling_batch(backend: str) -> type[SamplingBatch]:
    """The class of a step's batch, by the kernels of the target's backend where it has some."""
    if backend == "triton":  # kernels are not imported before they are wanted: that takes a second
        from specpaged.sampling.device import KernelSamplingBatch

        return KernelSamplingBatch
    if backend == "cpp":
        from specpaged.sampling.cpu import CppSamplingBatch

        return CppSamplingBatch
    return SamplingBatch
