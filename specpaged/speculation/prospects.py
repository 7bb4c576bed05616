"""What drafts could come to in batches of some size: remembered, as decisions ask it more often than it changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specpaged.speculation.acceptance import AcceptanceModel
from specpaged.speculation.cost_model import CostModel

# Of the time, what goes into looking whether sequences that do not draft should, beside what is in advance: all of it
# where drafts that are next to certain would make decoding so many times as fast, or more; else less, by this power of
# what they would gain: where that is little, passes of the drafter are dear, and as much time tells of fewer drafts.
LOOKING, _FULL_GAIN, _POWER = 0.01, 3.0, 1.5
_HOPELESS = 0.25  # of that, where not even drafts such as those of the best requests so far would pay
_CERTAIN = 4.0  # the logit of drafts that nothing is to be hoped beyond
_MEMORY = 256  # plans that what could be gained is asked for once, and as many as there were so far


class Prospects:
    """Remembers what it would bring to begin to draft: `gain_of` says it of the chances of each sequence's drafts."""

    def __init__(
        self, costs: CostModel, acceptance: AcceptanceModel, gain_of: Callable[[Sequence[Sequence[float]]], float]
    ):
        self.costs = costs
        self.acceptance = acceptance
        self._gain_of = gain_of
        self._num_plans = self._asked = 0  # so far, and when that was asked anew
        # By batch size, most drafts of one sequence, the costs' way, and the logit that is expected of the drafts.
        self._gains: dict[tuple, float] = {}

    def count_plan(self) -> None:
        """Another plan is made: now and then all is forgotten."""
        self._num_plans += 1
        if self._num_plans - self._asked >= min(_MEMORY, self._asked):
            self._asked = self._num_plans
            self.forget()

    def forget(self) -> None:
        """All is asked anew."""
        self._gains.clear()

    def gain(self, num_seqs: int, expected_logit: float, most: int) -> float:
        """How many times as fast decoding would be if so many drafted, and drafts stood as expected; 0: it is not to
        pay.
        """
        key = num_seqs, most, self.costs.way, expected_logit
        gain = self._gains.get(key)
        if gain is None:
            chances = self.acceptance.chances(expected_logit, most)
            gain = self._gains[key] = self._gain_of([chances] * num_seqs)
        return gain

    def share_of_looking(self, num_seqs: int, most: int) -> float:
        """How much time may go into looking; 0 where drafts that are next to certain would not pay."""
        certain = self.gain(num_seqs, _CERTAIN, most) if most else 0.0
        if not certain:
            return 0.0
        share = LOOKING * min(1.0, (certain - 1.0) / (_FULL_GAIN - 1.0)) ** _POWER
        is_hopeful = self.gain(num_seqs, round(self.acceptance.hopeful_logit, 1), most) > 0.0
        return share if is_hopeful else _HOPELESS * share
