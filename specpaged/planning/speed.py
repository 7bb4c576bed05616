"""Tokens that a second is expected to bring, by batch, K and context."""

from __future__ import annotations

import math
from dataclasses import dataclass

from specpaged.planning.pass_costs import PassCosts
from specpaged.speculation.pass_seconds import PassShape

_USUAL_LAG = 1.25  # tokens that the draft has not run, of a sequence that drafts in every round, in the mean


@dataclass(frozen=True)
class Speed:
    """Rounds of sequences with `context` known tokens each, of which a draft reads `window` at most."""

    costs: PassCosts
    context: float
    window: int | None = None

    def round_seconds(self, num_seqs: int, num_drafts: int, num_drafting: int | None = None) -> float:
        """Of a batch, all or `num_drafting` of which draft as many; 0: plain decoding."""
        costs, num_drafting = self.costs.costs, num_seqs if num_drafting is None else num_drafting
        num_rows = num_seqs + num_drafting * num_drafts
        seconds = costs.target.of(PassShape(num_rows, num_seqs, self.context)) + costs.rest(num_seqs)
        if num_rows == num_seqs:
            return seconds - costs.saved(num_seqs)
        seconds += costs.proposal(num_drafting)
        if costs.draft is None:
            return seconds
        read, lag = self.context, _USUAL_LAG
        if self.window is not None and self.window < self.context:
            read = 0.75 * self.window  # between half and all of it
            lag += self.costs.tokens(num_drafts)  # of two tokens one is run again when the window slides
        first = PassShape(math.ceil(num_drafting * lag), num_drafting, read)
        further = PassShape(num_drafting, num_drafting, read)
        return seconds + costs.draft.of(first) + (num_drafts - 1) * costs.draft.of(further)

    def tokens_per_second(self, num_seqs: int, num_drafts: int, num_drafting: int | None = None) -> float:
        """Of the whole batch; 0 of none."""
        if num_seqs == 0:
            return 0.0
        num_drafting = num_seqs if num_drafting is None else num_drafting
        tokens = num_seqs + num_drafting * (self.costs.tokens(num_drafts) - 1.0)
        return tokens / self.round_seconds(num_seqs, num_drafts, num_drafting)

    def best(self, num_seqs: int, most_drafts: int) -> float:
        """What a batch all of which drafts brings over plain decoding, at the K that promises most."""
        drafting = max(self.tokens_per_second(num_seqs, k) for k in range(1, most_drafts + 1))
        return drafting / self.tokens_per_second(num_seqs, 0)
