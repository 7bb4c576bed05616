"""How likely a draft token is to stand: by what the drafter thinks of it, its place, and how its request has fared."""

from __future__ import annotations

import math
from collections.abc import Sequence

MOST_POSITIONS = 16  # that have an intercept of their own; later drafts share the last one
_FORGETTING = 0.93  # of what a request's older drafts have shown: the last fifteen or so count
_FORGETTING_OF_ALL = 0.998
_LEARNED, _LEARNS_EVERY = 1000, 4  # outcomes that are all learned from; behind them, of every so many calls one is
_PRIOR_DRAFTS = 2.0  # that a new request is taken to have seen, with the outcomes of all others
_LEARNING_RATES = (0.05, 0.01)  # at first, and once something is known
_SHARE_RATE = 0.02
_SPREAD_RATE = 0.02
_MOST_LOGIT = 6.0  # certainty is never believed


class RequestAcceptance:
    """What the drafts of one request have shown: an average that forgets."""

    __slots__ = ("lead", "num_accepted", "num_seen")

    def __init__(self) -> None:
        self.num_seen = 0.0  # drafts of which all before have stood, older ones for less
        self.num_accepted = 0.0
        self.lead = 0.0  # how far that lies above the average of all requests, in logits, as of the last outcome


class AcceptanceModel:
    """The probability that a draft token stands, given that all before it stand; calibrated as outcomes come.

    With the evidence x of a draft token, in logits, as a drafter gives it:  logit p = a x + b_j + c r,  where j is its
    place and r how far its request's average lies above all requests', in logits. a, b and c follow the outcomes by
    stochastic gradient descent on their likelihood. Without evidence, as before anything is drafted, p lies between the
    average of all requests and the request's own, as far towards the latter as outcomes have borne out (`share`).
    """

    def __init__(self, prior: float = 0.6):
        self.slope = 1.0
        self.intercepts = [0.0] * MOST_POSITIONS
        self.request_weight = 0.5
        self.share = 0.5  # of the way from the average of all requests to the one's own, in logits
        self.variance = 0.0  # of logit p around what was expected of the request
        self.num_seen = 10.0
        self.num_accepted = 10.0 * prior
        self.num_outcomes = 0
        self._num_calls = 0
        self._mean_logit = logit(prior)

    @property
    def mean(self) -> float:
        """The share of drafts that stood, of all requests' last few hundred."""
        return self.num_accepted / self.num_seen

    @property
    def spread(self) -> float:
        """How far evidence moves logit p away from what was expected: 0 for a drafter whose evidence says nothing."""
        return math.sqrt(self.variance)

    def expected(self, request: RequestAcceptance, surplus: float = 0.0) -> float:
        """The probability of a request's next draft, whatever it will be; `surplus` logits more."""
        return sigmoid(self._mean_logit + self.share * request.lead + surplus)

    def chances(self, request: RequestAcceptance, num_tokens: int, surplus: float = 0.0) -> list[float]:
        """[num_tokens]: that so many drafts that are still to be made stand."""
        expected = self.expected(request, surplus)
        return [expected**n for n in range(1, num_tokens + 1)]

    def chances_of(self, request: RequestAcceptance, evidence: Sequence[float]) -> list[float]:
        """[len(evidence)]: that drafts with this evidence stand, each with all before it. NaN never stands."""
        chance, chances = 1.0, []
        slope, intercepts = self.slope, self.intercepts
        offset = self.request_weight * request.lead
        for j, x in enumerate(evidence):
            value = slope * x + intercepts[j if j < MOST_POSITIONS else -1] + offset
            chance *= 1.0 / (1.0 + math.exp(-value)) if x == x else 0.0
            chances.append(chance)
        return chances

    def observe(
        self, request: RequestAcceptance, outcomes: Sequence[bool], evidence: Sequence[float] | None = None
    ) -> None:
        """Of a request's drafts, first to last, these stood or fell: none behind one that fell, which says nothing.

        What was drafted and not verified has an outcome, too, where all before it stood: the target's own token.
        """
        self.num_outcomes += len(outcomes)
        lead = request.lead
        expected = self._mean_logit + self.share * lead
        chance = sigmoid(expected)
        errors = 0.0
        own_seen, own_accepted = request.num_seen, request.num_accepted
        seen, accepted = self.num_seen, self.num_accepted
        for stood in outcomes:
            errors += stood - chance
            own_seen = own_seen * _FORGETTING + 1.0
            own_accepted = own_accepted * _FORGETTING + stood
            seen = seen * _FORGETTING_OF_ALL + 1.0
            accepted = accepted * _FORGETTING_OF_ALL + stood
        request.num_seen, request.num_accepted = own_seen, own_accepted
        self.num_seen, self.num_accepted = seen, accepted
        self._num_calls += 1
        if evidence is not None and (self.num_outcomes < _LEARNED or self._num_calls % _LEARNS_EVERY == 0):
            for j, (stood, x) in enumerate(zip(outcomes, evidence, strict=False)):
                if x == x:
                    self._learn(x, j, lead, stood, expected)
        self.share = min(1.2, max(0.0, self.share + _SHARE_RATE * errors * lead))
        mean = self.mean
        self._mean_logit = logit(mean)
        own = (request.num_accepted + _PRIOR_DRAFTS * mean) / (request.num_seen + _PRIOR_DRAFTS)
        request.lead = logit(own) - self._mean_logit

    def _learn(self, x: float, j: int, lead: float, stood: bool, expected: float) -> None:
        j = min(j, MOST_POSITIONS - 1)
        value = self.slope * x + self.intercepts[j] + self.request_weight * lead
        self.variance += _SPREAD_RATE * ((value - expected) ** 2 - self.variance)
        rate = _LEARNING_RATES[self.num_outcomes >= _LEARNED]
        error = rate * (stood - 1.0 / (1.0 + math.exp(-value)))
        self.intercepts[j] += error
        slope = self.slope + error * x / _MOST_LOGIT
        self.slope = slope if 0.0 < slope < 3.0 else min(3.0, max(0.0, slope))
        weight = self.request_weight + error * lead
        self.request_weight = weight if 0.0 < weight < 2.0 else min(2.0, max(0.0, weight))


def sigmoid(x: float) -> float:
    """1 / (1 + e^-x)."""
    return 1.0 / (1.0 + math.exp(-x))


def logit(p: float) -> float:
    """The inverse of `sigmoid`, cut off at +-6: certainty is never believed."""
    if not 0.00248 < p < 0.99752:  # e^-6 / (1 + e^-6)
        return -_MOST_LOGIT if p < 0.5 else _MOST_LOGIT
    return math.log(p / (1.0 - p))


def logits_of(logprobs: Sequence[float]) -> list[float]:
    """The evidence of a drafter that knows log-probabilities of its tokens. NaN stays NaN."""
    return [logit(math.exp(min(0.0, x))) if x == x else x for x in logprobs]
