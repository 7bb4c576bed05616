"""When a proposal goes no deeper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specpaged.speculation.acceptance import sigmoid


@dataclass(frozen=True, slots=True)
class StopRule:
    """A proposal goes no deeper as soon as no row's next draft is worth its part of a pass, in tokens.

    Row i's chance that all its drafts stand is multiplied by sigmoid(slope * x + intercepts[j] + leads[i]), x being the
    evidence of its draft j. The next pass is worth it while

        sum over i of  max(0, chance_i * expected_i - row_tokens)  >  pass_tokens
    """

    slope: float
    intercepts: Sequence[float]
    leads: Sequence[float]  # of each row
    expected: Sequence[float]  # of each row: the probability of its next draft
    row_tokens: float  # what one more row to verify costs
    pass_tokens: float  # what one more pass of the drafter costs

    def goes_on(self, chances: Sequence[float], rows: Sequence[int]) -> bool:
        """Whether another pass is worth it for these rows with these chances."""
        gain = sum(
            max(0.0, chance * self.expected[i] - self.row_tokens) for chance, i in zip(chances, rows, strict=True)
        )
        return gain > self.pass_tokens

    def chance(self, before: float, j: int, x: float, row: int) -> float:
        """The chance of a row, once its draft j is there, from what it was before."""
        if x != x:
            return 0.0
        return before * sigmoid(self.slope * x + self.intercepts[min(j, len(self.intercepts) - 1)] + self.leads[row])
