"""Whether what drafts gain repays it to catch up with what the drafter has not run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specpaged.speculation.controller import Candidate
from specpaged.speculation.cost_model import CostModel
from specpaged.speculation.repaid_lag import NEAR, RepaidLag
from specpaged.speculation.selection import Selection

_WITHIN = 128  # tokens at most
# Of the tokens that may still come, those that will, as long as nothing is known, and requests that say so; and how
# many say what it is from then on.
_WILL_COME, _SAY_SO = 0.5, (4, 64)


class Repayment:
    """Within the tokens that are still to come, as far as those who have ended say how many that will be."""

    def __init__(self, costs: CostModel):
        self.costs = costs
        self._will_come, self._num_said = _WILL_COME, _SAY_SO[0]

    def observe_end(self, num_tokens: int, most_tokens: int) -> None:
        """A sequence has ended with so many tokens of output, of those that it might have had."""
        self._num_said = min(self._num_said + 1, _SAY_SO[1])
        self._will_come += (num_tokens / most_tokens - self._will_come) / self._num_said

    def repaid(self, candidates: Sequence[Candidate], selection: Selection, plain_seconds: float) -> list[bool]:
        """Of each, whether its tokens that are to come gain more by drafting than it takes to catch up before: beside
        plain steps of so many seconds.
        """
        if not any([count and c.lag > NEAR for c, count in zip(candidates, selection.counts, strict=True)]):
            return [True] * len(candidates)
        most = self.lag_repaid(selection, plain_seconds)
        return [most is None or most.repays(c.lag, c.num_left) for c in candidates]

    def lag_repaid(self, selection: Selection, plain_seconds: float) -> RepaidLag | None:
        """What one of them may have to catch up with; None where nobody drafts, however little that is, or has to catch
        up, as heads run in any case what the target has run.
        """
        if self.costs.following is not None or not any(selection.counts):
            return None
        gained = plain_seconds / len(selection.counts) - 1.0 / selection.tokens_per_second
        catching_up = self.costs.drafting.per_row_behind  # in the first pass
        per_token = self._will_come * gained / catching_up if catching_up > 0 else math.inf
        return RepaidLag(per_token, _WITHIN / self._will_come)
