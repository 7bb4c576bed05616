"""What the steps of one batch size take, by how much is drafted and verified: tables, as a controller asks often."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specpaged.speculation.cost_model import CostModel

_SEVERAL = 3  # rows of a sequence
_USES = 32  # of a table of times, until it is made anew
_NEAR_CONTEXT = 64  # tokens, by which contexts are alike


@dataclass(slots=True)
class StepTimes:
    """Seconds of steps of one batch size."""

    context: float
    plain: float  # of a step that drafts nothing
    verify: list[float]  # [n]: with n drafts to verify, whatever drafting them took
    first: list[float]  # [n]: until n sequences have a draft each; nothing where no model drafts
    later: list[float]  # [n]: for each further one
    doubt: float  # the standard deviation, in logarithms, of what steps with a few drafts take beside plain ones
    rest_doubt: float = 0.0  # what of it is of the rest
    uses: int = 0

    def drafting(self, lengths: Sequence[int]) -> float:
        """What passes took that have made drafts of these lengths."""
        if not (self.later and any(lengths)):
            return 0.0
        widths = [sum([length > depth for length in lengths]) for depth in range(max(lengths))]
        return self.first[widths[0]] + sum([self.later[width] for width in widths[1:]])

    @classmethod
    def of(cls, costs: CostModel, batch_size: int, most_drafts: int, context: float) -> StepTimes:
        """By the costs as they are known now."""
        target = costs.target
        rows = target.table(batch_size + most_drafts)
        per_row = context * target.per_row_and_kv_token
        of_sequences = target.of_sequences(batch_size, context)
        plain = rows[batch_size] + batch_size * per_row + of_sequences
        plain = max(0.5 * plain, plain - costs.saved(batch_size))
        if not costs.hides_host:
            plain += costs.rest(batch_size, costs.plain_rounds) / costs.plain_rounds
            of_sequences += costs.rest(batch_size, costs.drafting_rounds) / costs.drafting_rounds
        verify = [rows[n] + n * per_row + of_sequences for n in range(batch_size, batch_size + most_drafts + 1)]
        rest_doubt = 0.0
        if not (costs.hides_host or costs.following):  # heads follow in plain steps, too, whose rest is not told alone
            rest = costs.rest(batch_size, costs.plain_rounds) / costs.plain_rounds
            rest_doubt = rest / plain * costs.rest_doubt(batch_size)
        doubt = math.hypot(costs.errors.doubt(batch_size, _SEVERAL * batch_size), rest_doubt)
        if costs.draft is None:
            return cls(context, plain, verify, [], [], doubt, rest_doubt)
        first, later = costs.drafting.tables(batch_size, context)
        besides = 0.0 if costs.hides_host else costs.proposals_per_round * costs.seconds_per_drafting
        cold = 0.0 if costs.hides_host else (1.0 - costs.proposals_per_round) * costs.drafting.cold.seconds
        first = [seconds + n * besides + (cold if n else 0.0) for n, seconds in enumerate(first)]
        return cls(context, plain, verify, first, later, doubt, rest_doubt)


class TimesOfSteps:
    """StepTimes of every batch size, as often as they are asked for. They are made anew now and then, and when the
    `context` has grown: the tokens that sequences have in the mean.
    """

    def __init__(self, costs: CostModel):
        self.costs = costs
        self.context = 0.0
        self._known: dict[tuple, StepTimes] = {}  # by batch size and the costs' way

    def of(self, batch_size: int, num_drafts: int) -> StepTimes:
        """With so many drafts at least."""
        context = self.context
        key = batch_size, self.costs.way
        times = self._known.get(key)
        if (
            times is None
            or len(times.verify) <= num_drafts
            or times.uses >= _USES
            or abs(context - times.context) > _NEAR_CONTEXT + 0.2 * times.context
        ):
            most = max(num_drafts, batch_size if times is None else len(times.verify) - 1)
            times = self._known[key] = StepTimes.of(self.costs, batch_size, most, context)
        times.uses += 1
        return times

    def expire(self) -> None:
        """From now on, what passes take is as it is known now."""
        self.costs.target.expire_table()
        self._known.clear()
