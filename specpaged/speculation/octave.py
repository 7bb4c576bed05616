"""Batch sizes that are about the same."""

from __future__ import annotations


def octave_of(num_seqs: int) -> int:
    """The exponent of the nearest power of two, in the logarithm: a batch of 32 that has lost one is of the same."""
    return ((2 * max(1, num_seqs) ** 2).bit_length() - 1) // 2
