"""Where the rows of a left-padded batch end. Ints only."""

from __future__ import annotations

from collections.abc import Sequence


def aligned_length(starts: Sequence[int], lengths: Sequence[int], max_length: int) -> int:
    """L', the column at which all rows are to end, for rows whose tokens lie in columns start .. start + length - 1.

    EQSPEC's L' = max_j (c_j + a_j) (arXiv 2510.22876): the longest row is not padded. Where all rows end further right
    than that, because the longest one has left, they may stay: L' is then the first column at which one of them ends,
    unless that is past max_length. Three rows that ended at L = 10 and gain 1, 1 and 5 tokens, a_i:

        row   starts   lengths   ends        L' = 15: a row moves by L' - L - a_i
        0     0        11        11          4
        1     2        9         11          4
        2     0        15        15          0
    """
    longest = max(lengths)
    first_end = min(start + length for start, length in zip(starts, lengths, strict=True))
    return first_end if longest <= first_end <= max_length else longest
