"""From logits to tokens: processing, noise, log-probabilities."""

from __future__ import annotations

from specpaged.sampling.batch import SamplingBatch


def get_sampling_batch(backend: str) -> type[SamplingBatch]:
    """The class of a step's batch, by the kernels where the target's backend is "triton"."""
    if backend == "triton":  # kernels are not imported before they are wanted: that takes a second
        from specpaged.sampling.device import KernelSamplingBatch

        return KernelSamplingBatch
    return SamplingBatch
