"""Octaves are around powers of two, so that a batch that has lost one is of the same as a full one."""

from __future__ import annotations

import math

from specpaged.speculation.octave import octave_of


def test_an_octave_is_the_nearest_power_of_two():
    assert [octave_of(num_seqs) for num_seqs in (1, 2, 3, 5, 6, 31, 32, 33)] == [0, 1, 2, 2, 3, 5, 5, 5]
    assert all(abs(math.log2(num_seqs) - octave_of(num_seqs)) <= 0.5 for num_seqs in range(1, 5000))
    assert octave_of(0) == 0
