"""When a proposal goes no deeper, and what of it is worth verifying, where nobody can be asked in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specpaged.speculation.acceptance import AcceptanceModel, RequestAcceptance, sigmoid


@dataclass(frozen=True, slots=True, eq=False)
class StopRule:
    """A proposal goes no deeper as soon as no row's next draft is worth its part of a pass, in tokens.

    Row i's chance that all its drafts stand is multiplied by sigmoid(slope * x + intercepts[j] + leads[i]), x being the
    evidence of its draft j. The next pass is worth it while

        sum over i of  max(0, chance_i * expected_i - row_tokens)  >  pass_tokens

    Of what was drafted, those are verified whose chance is at least `row_tokens`, where the controller does not select
    itself: of drafts that are made within a call of several rounds.
    """

    slope: float
    intercepts: Sequence[float]
    leads: Sequence[float]  # of each row
    expected: Sequence[float]  # of each row: the probability of its next draft
    row_tokens: float  # what one more row to verify costs
    pass_tokens: float  # what one more pass of the drafter costs

    @classmethod
    def of(
        cls, model: AcceptanceModel, requests: Sequence[RequestAcceptance], row_tokens: float, pass_tokens: float
    ) -> StopRule:
        """For drafts of these requests, as the model knows them. To noise, a row may seem to cost less than nothing."""
        return cls(
            slope=model.slope,
            intercepts=model.intercepts,
            leads=[model.request_weight * request.lead for request in requests],
            expected=[model.expected(request) for request in requests],
            row_tokens=max(0.0, row_tokens),
            pass_tokens=pass_tokens,
        )

    def goes_on(self, chances: Sequence[float], rows: Sequence[int]) -> bool:
        """Whether another pass is worth it for these rows with these chances."""
        gain = sum(
            max(0.0, chance * self.expected[i] - self.row_tokens) for chance, i in zip(chances, rows, strict=True)
        )
        return gain > self.pass_tokens

    def num_worth(self, evidence: Sequence[float], row: int) -> int:
        """How many of a row's drafts, of which there is this evidence, are worth verifying."""
        chance = 1.0
        for j, x in enumerate(evidence):
            chance = self.chance(chance, j, x, row)
            if not chance >= self.row_tokens:
                return j
        return len(evidence)

    def of_rows(self, rows: Sequence[int]) -> StopRule:
        """The rule for these of its rows alone."""
        return replace(self, leads=[self.leads[i] for i in rows], expected=[self.expected[i] for i in rows])

    def chance(self, before: float, j: int, x: float, row: int) -> float:
        """The chance of a row, once its draft j is there, from what it was before."""
        if x != x:
            return 0.0
        return before * sigmoid(self.slope * x + self.intercepts[min(j, len(self.intercepts) - 1)] + self.leads[row])
