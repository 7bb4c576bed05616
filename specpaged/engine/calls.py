"""How many rounds a call will have, as plans expect it, and in how many of them drafts are made on the way."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from specpaged.engine.call_length import CallLength
from specpaged.engine.sequence import Sequence
from specpaged.speculation.controller import Plan
from specpaged.speculation.cost_model import CostModel

# Of rounds that draft, those with a proposal of their own, as long as nothing is known of that; and what the newest
# round says of it.
_OWN_PROPOSALS, _NEWEST = 0.25, 0.03


class Calls:
    """One round each, until somebody says what their `length` is, and whether drafts are made there (`may_draft`)."""

    def __init__(self) -> None:
        self.length = CallLength(1)  # of plain steps
        self.may_draft = False  # whether drafts may be made in such a call, so that others are one, too
        self._own_proposals = _OWN_PROPOSALS  # of rounds that draft, those whose drafts were not

    def most_rounds(self, num_seqs: int, drafts: bool) -> int:
        """Of one call for so many sequences."""
        return 1 if drafts and not self.may_draft else self.length.num_rounds(num_seqs)

    def expect(self, sequences: SequenceOf[Sequence], asks: bool, costs: CostModel | None) -> tuple[int, int]:
        """How many rounds a call will have, plain and drafting, where the controller has to be asked between drafting
        rounds (`asks`) or not; the costs are told, as its own time is spread over them.
        """
        in_one_call = all(map(may_be_in_one_call, sequences))
        are_one_call = in_one_call and not asks
        plain = self.most_rounds(len(sequences), False) if in_one_call else 1
        drafting = self.most_rounds(len(sequences), True) if are_one_call else 1
        if costs is not None:
            costs.plain_rounds, costs.drafting_rounds = plain, drafting
            costs.proposals_per_round = self._own_proposals if are_one_call and self.may_draft else 1.0
        return plain, drafting

    def went_by(self, num_rounds: int, plan: Plan) -> None:
        """So many rounds have followed this plan, behind which drafts, if any, were made in the same call."""
        if num_rounds and any(plan.num_draft_tokens):
            self._own_proposals *= (1.0 - _NEWEST) ** num_rounds

    def proposed(self) -> None:
        """In one round, they were not."""
        self._own_proposals += _NEWEST * (1.0 - self._own_proposals)


def may_be_in_one_call(sequence: Sequence) -> bool:
    """Whether several rounds of it may be."""
    request = sequence.sampling_request
    return request.takes_argmax and request.params.logprobs is None
