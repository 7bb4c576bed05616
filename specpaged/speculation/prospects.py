"""What drafts could come to in batches of some size: remembered, as decisions ask it more often than it changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specpaged.speculation.acceptance import AcceptanceModel
from specpaged.speculation.cost_model import CostModel

LOOKING = 0.006  # of the time goes into looking whether sequences that do not draft should, beside what is in advance
_LOOKING_HOPELESS = 0.0005  # where not even drafts such as those of the best requests so far would pay
_CERTAIN = 4.0  # the logit of drafts that nothing is to be hoped beyond
_MEMORY = 256  # plans that what could pay is asked for once, and as many as there were so far


class Prospects:
    """Remembers whether it would pay to begin to draft, which `pays` says of the chances of each sequence's drafts."""

    def __init__(
        self, costs: CostModel, acceptance: AcceptanceModel, pays: Callable[[Sequence[Sequence[float]]], bool]
    ):
        self.costs = costs
        self.acceptance = acceptance
        self._pays = pays
        self._num_plans = self._asked = 0  # so far, and when what could pay was asked anew
        # By batch size, most drafts of one sequence, rounds, and the logit that is expected of the drafts.
        self._paying: dict[tuple[int, int, int, int, float], bool] = {}

    def count_plan(self) -> None:
        """Another plan is made: now and then all is forgotten."""
        self._num_plans += 1
        if self._num_plans - self._asked >= min(_MEMORY, self._asked):
            self._asked = self._num_plans
            self.forget()

    def forget(self) -> None:
        """All is asked anew."""
        self._paying.clear()

    def would_pay(self, num_seqs: int, expected_logit: float, most: int) -> bool:
        """Whether it would to draft for so many, if their drafts stood as expected."""
        key = num_seqs, most, self.costs.plain_rounds, self.costs.drafting_rounds, expected_logit
        pays = self._paying.get(key)
        if pays is None:
            chances = self.acceptance.chances(expected_logit, most)
            pays = self._paying[key] = self._pays([chances] * num_seqs)
        return pays

    def share_of_looking(self, num_seqs: int, most: int) -> float:
        """How much time may go into looking; 0 where drafts that are next to certain would not pay."""
        if not most:
            return 0.0
        hopes = (round(self.acceptance.hopeful_logit, 1), LOOKING), (_CERTAIN, _LOOKING_HOPELESS)
        return next((share for logit, share in hopes if self.would_pay(num_seqs, logit, most)), 0.0)
