"""Looking back at sequences that do not draft, to find out whether they should: within a share of the time."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from specpaged.speculation.controller import GLANCE, Candidate
from specpaged.speculation.cost_model import CostModel

SHORTEST = 4  # tokens: a pass of a few rows costs hardly more than one of one
_OF_PROPOSAL = 0.5  # of what a proposal takes beside its passes, what one takes that drafts nothing
_MOST_SAVED = 4.0  # plain steps, that may be spent on looking at once
_DEBT = 4.0  # times the most credit, that one look may take of who has it, or has never looked
_IN_VAIN, _WEARY = 12, 0.6  # looks since anybody has drafted, from which on so much of their share goes into others
_FAR_BEHIND = 2 * GLANCE + 1  # tokens: who is, is rather glanced at
# Outcomes of a request, which make a look at another that takes twice as many tokens as welcome; more than so many make
# no difference: then it is whose last glance is the longest ago.
_KNOWN, _WELL_KNOWN = 4.0, 8.0
_NEVER = -GLANCE, -1  # the last glance of who was not glanced at
_MOST_WAIT = 64  # steps
# Of the time that it takes to earn a look, what has gone by since the last outcome of who is looked at: who has just
# stopped, and is looked at at once, is not when its text might have turned again.
_APART = 0.2


class Looks:
    """Spends what it is given, `credit` in seconds, on sequences of which little is known, and with short lags."""

    def __init__(self, costs: CostModel):
        self.costs = costs
        self.credit = costs.target.of_rows(1)  # in advance: at first nothing is known of any drafts
        self.most = _MOST_SAVED * self.credit
        self._owed = 0.0  # of credit in advance
        self.share = 0.0  # of the time, that goes into looking
        self._earned_since = 0  # steps of the plan that stands, whose share is earned
        self._per_step = 0.0  # credit, earned in a step
        self.due = _MOST_WAIT  # steps, behind which there may be somebody to look at, as of the last choice
        self._num_looks = self._num_in_vain = 0
        # Of each that was glanced at: the tokens that it had then, and how many looks there had been.
        self._glanced: dict[Hashable, tuple[int, int]] = {}

    def earn(self, num_steps: int, plain_seconds: float, since_plan: bool = False) -> None:
        """Its share of so many steps more, which would take so long plainly, up to what may be saved: what nobody
        needed for long is not spent at once later; and not all of it, as long as looks have led to nothing.

        The steps are those since a plan was made, or (`since_plan`) since it was last looked back while that stands.
        """
        if since_plan:
            self._earned_since += num_steps
        else:
            num_steps, self._earned_since = max(0, num_steps - self._earned_since), 0
        self.most = _MOST_SAVED * plain_seconds
        self._per_step = self.share * plain_seconds * (_WEARY if self._num_in_vain >= _IN_VAIN else 1.0)
        earned = num_steps * self._per_step
        paid_back = min(self._owed, earned)
        self._owed -= paid_back
        self.credit = min(self.most, self.credit + earned - paid_back)

    def advance(self, seconds: float) -> None:
        """More credit, up to what may be saved, which is earned later: short outputs, which come often, have hardly
        any.
        """
        seconds = min(seconds, self.most - self._owed, self.most - self.credit)
        if seconds > 0.0:
            self._owed += seconds
            self.credit += seconds

    def choose(
        self, candidates: Sequence[Candidate], counts: Sequence[int], num_outcomes: Sequence[float]
    ) -> tuple[list[int], list[int]]:
        """Whom there is credit to look back at, of those that have no drafts by `counts`: indices of candidates.

        Of each so many outcomes are known. Where others draft, their first pass has room for a few rows more; else it
        takes one of its own, for which a few tokens should have come together. Who is far behind, or too far for the
        credit, is glanced at, if that can be done: which of the chosen ones comes second. That is done as often as
        there are tokens that no glance has seen, and of several first to whom it was done the longest ago. Else who is
        too far behind is given up; but prompts are long, and of nobody's drafts would ever be known whether they stand:
        one may be looked at on debt. Where nobody drafts, who has just stopped is not looked at yet. In how many steps
        there may be somebody again is `due` from then on.
        """
        is_alone = not any(counts)
        if not is_alone:
            self._num_in_vain = 0
        idle = [
            (
                self._price(candidate) * (1.0 + min(num_outcomes[i], _WELL_KNOWN) / _KNOWN),
                self._glanced.get(candidate.sequence, _NEVER)[1],
                i,
            )
            for i, (candidate, count) in enumerate(zip(candidates, counts, strict=True))
            if not count and candidate.most and candidate.num_unseen > (SHORTEST if is_alone else 0)
        ]
        self.due = _MOST_WAIT if idle else 1 + SHORTEST
        if not idle:
            return [], []
        rows = sum(candidate.lag for candidate, count in zip(candidates, counts, strict=True) if count)
        draft = self.costs.draft
        of_proposal = _OF_PROPOSAL * (self.costs.proposal(1) + self.costs.saved(len(candidates)))
        before = -of_proposal if is_alone else draft.of_rows(rows)
        looks: list[int] = []
        glances: list[int] = []
        spent = 0.0
        for *_, i in sorted(idle):
            candidate = candidates[i]
            num_rows = candidate.lag - 1  # the newest token has no successor yet
            seconds = draft.of_rows(rows + num_rows) - before
            is_glance = candidate.may_glance and (seconds > self.credit or candidate.lag > _FAR_BEHIND)
            if is_glance:
                num_rows = GLANCE
                seconds = draft.of_rows(rows + num_rows) - before
                if self._num_since_glance(candidate) < GLANCE // 2:  # fewer than one tells of
                    continue
            if is_alone and num_outcomes[i] >= _KNOWN and self._is_too_early(candidate, seconds):
                continue
            if seconds > self.credit:
                may_owe = not (is_glance or looks) and (self.credit >= self.most or not self._num_looks)
                if not (may_owe and seconds <= _DEBT * self.most):
                    self._wait_for(seconds)
                    continue
            if is_glance:
                glances.append(i)
                self._glanced[candidate.sequence] = candidate.context_len, self._num_looks + len(looks)
            looks.append(i)
            rows, spent = rows + num_rows, seconds
        self.credit -= spent
        if looks:
            self._wait_for(spent / len(looks))
        self._num_looks += len(looks)
        self._num_in_vain += len(looks)
        return looks, glances

    def _is_too_early(self, candidate: Candidate, seconds: float) -> bool:
        """Whether but a small part of the time has gone by, that it takes to earn so many seconds, since its last
        outcome.
        """
        num_new = min(candidate.num_unseen, self._num_since_glance(candidate))
        missing = _APART * seconds - num_new * self._per_step
        if missing > 0.0:
            self._wait_for(self.credit + missing)
        return missing > 0.0

    def _wait_for(self, credit: float) -> None:
        """With so much credit, somebody could be looked at."""
        missing = max(0.0, credit - self.credit)
        if missing < _MOST_WAIT * self._per_step:  # not where it is never earned
            self.due = min(self.due, max(1, math.ceil(missing / self._per_step)))

    @staticmethod
    def _price(candidate: Candidate) -> int:
        """In tokens to read."""
        return GLANCE if candidate.may_glance and candidate.lag > _FAR_BEHIND else candidate.lag

    def _num_since_glance(self, candidate: Candidate) -> int:
        """Its tokens that have come since it was glanced at last."""
        num_tokens, _ = self._glanced.get(candidate.sequence, _NEVER)
        return candidate.context_len - num_tokens

    def forget(self, sequence: Hashable) -> None:
        """The sequence has ended."""
        self._glanced.pop(sequence, None)
