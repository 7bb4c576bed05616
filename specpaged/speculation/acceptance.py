"""How likely a draft token is to stand: by what the drafter thinks of it, its place, and how its request has fared."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

MOST_POSITIONS = 16  # that have an intercept of their own; later drafts share the last one
_FORGETTING = 0.93  # of what a request's older drafts have shown: the last fifteen or so count
_FORGETTING_OF_ALL = 0.998
_LEARNED, _LEARNS_EVERY = 600, 4  # outcomes that are all learned from; behind them, of every so many calls one is
# A request counts for so many drafts among all others, with its own average, half of it once it has had so many; and
# each of its drafts for a little more.
_COUNTS_FOR, _EACH = 4.0, 0.015
_SHOWS = 4.0  # drafts of a request, from which on it says how far requests lie apart
_PRIOR_DRAFTS = 2.0  # that a new request is taken to have seen, with the outcomes of all others
_LEARNING_RATES = (0.05, 0.01)  # at first, and once something is known
_PLACE_RATE = 0.03
_SHARE_RATE = 0.02
_SPREAD_RATE = 0.02
_MISLEADS = -0.05  # nats of an outcome, by which evidence may be worse than none until it is known what it says
# In logits, of how far requests' drafts come to lie apart: as good as alike, or of several kinds.
_ALIKE, _DIFFER = 0.25, 0.8
# Outcomes of a request, behind which it is known what to expect of it; plans at most that are to find that out; and of
# a batch, so large a part that it is worth a plan.
_KNOWN, _MOST_TRIES, _PART = 5.0, 3, 0.25
_HOPE = 1.0  # in logits, of a request of which nothing is known, nor of any other
_MOST_LOGIT = 6.0  # certainty is never believed
# Standard deviations from what was expected, beyond which outcomes are of another text; and what is left of older ones.
_CONTRADICTS, _LEFT = 2.8, 0.3


class RequestAcceptance:
    """What the drafts of one request have shown: an average that forgets."""

    __slots__ = ("counted", "lead", "num_accepted", "num_seen", "num_tries")

    def __init__(self) -> None:
        self.num_seen = 0.0  # drafts of which all before have stood, older ones for less
        self.num_accepted = 0.0
        self.lead = 0.0  # how far that lies above the average of all requests, in logits, as of the last outcome
        self.num_tries = 0  # plans that were made to find out
        # What it counts for among the drafts of all requests, and those of them that stood; and how much all had
        # counted for by then, of which older ones are forgotten.
        self.counted = 0.0, 0.0, 0.0


class AcceptanceModel:
    """The probability that a draft token stands, given that all before it stand; calibrated as outcomes come.

    With the evidence x of a draft token, in logits, as a drafter gives it:  logit p = a x + b_j + c r,  where j is its
    place and r how far its request's average lies above all requests', in logits. a, b and c follow the outcomes by
    stochastic gradient descent on their likelihood. Without evidence, as before anything is drafted, p lies between the
    average of all requests and the request's own, as far towards the latter as outcomes have borne out (`share`); and
    by its place, as where several drafts stand the next one is likely to.
    """

    def __init__(self, prior: float = 0.6):
        self.slope = 1.0
        self.intercepts = [0.0] * MOST_POSITIONS
        self.request_weight = 0.5
        self.by_place = [0.0] * MOST_POSITIONS  # in logits, beside the average
        self.share = 0.5  # of the way from the average of all requests to the one's own, in logits
        self.variance = 0.0  # of logit p around what was expected of the request
        self.gain = 0.0  # nats by which evidence makes outcomes more likely than what was expected does
        self.num_seen = self._num_guessed = 6.0
        self.num_accepted = self.num_seen * prior
        self._num_counted = 0.0  # with all that is forgotten
        self.lead_variance = 1.0  # of requests' leads
        self.num_outcomes = 0
        self._num_calls = 0
        self._mean_logit = logit(prior)

    @property
    def mean(self) -> float:
        """The share of drafts that stood, lately, of requests of which nothing else is known.

        Each request counts for its own average, as of its last outcome, and hardly for more where it has many: whose
        drafts stand, has far more of them. Nor are its first ones to speak for it, as beginnings of texts are alike.
        """
        return self.num_accepted / self.num_seen

    @property
    def spread(self) -> float:
        """How far evidence moves logit p away from what was expected: 0 for a drafter whose evidence says nothing, or
        is not borne out.
        """
        return math.sqrt(self.variance) if self.gain > _MISLEADS else 0.0

    @property
    def requests_differ(self) -> bool:
        """Whether requests are of several kinds, so that much of what will come of a request's drafts is known only
        when some have had an outcome.
        """
        return self._lie_apart > _DIFFER

    @property
    def requests_are_alike(self) -> bool:
        """Whether a request of which nothing is known may be taken for one of the others."""
        return self._lie_apart < _ALIKE

    @property
    def _lie_apart(self) -> float:
        """How far requests do, in logits."""
        return self.share * math.sqrt(self.lead_variance)

    def tries(self, drafting: Sequence[RequestAcceptance], batch_size: int) -> bool:
        """Whether it is to be found out soon what comes of some of these requests' drafts, as requests differ and it is
        not known. Those have been tried once more then: nobody is waited for whose drafts never come.
        """
        if not self.requests_differ:
            return False
        unknown = [request for request in drafting if request.num_seen < _KNOWN and request.num_tries < _MOST_TRIES]
        if not unknown or len(unknown) < _PART * batch_size:
            return False
        for request in unknown:
            request.num_tries += 1
        return True

    def expected_logit(self, request: RequestAcceptance) -> float:
        """Of a request's next draft, whatever and wherever it will be, that it stands."""
        return self._mean_logit + self.share * request.lead

    @property
    def hopeful_logit(self) -> float:
        """Of a draft of one request among twenty, those whose drafts stand most."""
        return self._mean_logit + 2.0 * self.share * math.sqrt(self.lead_variance)

    def hope(self, request: RequestAcceptance) -> float:
        """How far above what is expected it may lie, in logits: as long as little is known, drafting finds out."""
        of_all, of_request = self._num_guessed / self.num_seen, _PRIOR_DRAFTS / (_PRIOR_DRAFTS + request.num_seen)
        return _HOPE * of_all * of_request

    def expected(self, request: RequestAcceptance) -> float:
        """The probability that a request's next draft stands, whatever and wherever it will be."""
        return sigmoid(self.expected_logit(request))

    def chances(self, expected_logit: float, num_tokens: int) -> list[float]:
        """[num_tokens]: that so many drafts that are still to be made stand."""
        chance, chances = 1.0, []
        for j in range(num_tokens):
            chance /= 1.0 + math.exp(-expected_logit - self.by_place[j if j < MOST_POSITIONS else -1])
            chances.append(chance)
        return chances

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
        self,
        request: RequestAcceptance,
        num_accepted: int,
        num_rejected: int,
        evidence: Sequence[float] | None = None,
    ) -> None:
        """Of a request's drafts the first ones stood; and the one behind them fell, or nothing is known of it.

        What was drafted and not verified has an outcome, too, where all before it stood: the target's own token.
        """
        num_drafts = num_accepted + num_rejected
        if num_drafts == 0:
            return
        self._num_calls += 1
        if self.num_outcomes < _LEARNED or self._num_calls % _LEARNS_EVERY == 0:
            lead = request.lead
            expected = self._mean_logit + self.share * lead
            for j in range(min(num_drafts, MOST_POSITIONS)):
                value = expected + self.by_place[j]
                self.by_place[j] += _PLACE_RATE * ((j < num_accepted) - 1.0 / (1.0 + math.exp(-value)))
                x = math.nan if evidence is None else evidence[j]
                if x == x:
                    self._learn(x, j, lead, j < num_accepted, value)
        self._add(request, num_accepted, num_rejected)

    def count(self, request: RequestAcceptance, num_accepted: int, num_rejected: int) -> None:
        """So many of a request's drafts stood, and so many fell, wherever in proposals they were.

        Where that is far from what the request has shown so far, its text has turned: that counts for little then.
        """
        num_drafts, mean = num_accepted + num_rejected, self.mean
        own = (request.num_accepted + _PRIOR_DRAFTS * mean) / (request.num_seen + _PRIOR_DRAFTS)
        if contradicts(num_accepted, num_drafts, own):
            request.num_seen *= _LEFT
            request.num_accepted *= _LEFT
        self._add(request, num_accepted, num_rejected)

    def _add(self, request: RequestAcceptance, num_accepted: int, num_rejected: int) -> None:
        num_drafts, lead = num_accepted + num_rejected, request.lead
        self.num_outcomes += num_drafts
        error = num_accepted - num_drafts * sigmoid(self._mean_logit + self.share * lead)
        keeps, ones = _decay(num_drafts)
        request.num_seen = request.num_seen * keeps + ones
        fallen = num_rejected if num_rejected < 2 else ones * num_rejected / num_drafts  # one is the last of its draft
        request.num_accepted = request.num_accepted * keeps + ones - fallen
        self._count(request, num_drafts, num_accepted)
        share = self.share + _SHARE_RATE * error * lead
        self.share = share if 0.0 < share < 1.2 else min(1.2, max(0.0, share))
        mean = self.num_accepted / self.num_seen
        self._mean_logit = logit(mean)
        own = (request.num_accepted + _PRIOR_DRAFTS * mean) / (request.num_seen + _PRIOR_DRAFTS)
        request.lead = logit(own) - self._mean_logit
        if request.num_seen > _SHOWS:
            self.lead_variance += _SPREAD_RATE * (request.lead**2 - self.lead_variance)

    def _count(self, request: RequestAcceptance, num_drafts: int, num_accepted: int) -> None:
        """Among all requests' drafts, what the request shows by now takes the place of what is left of what it did."""
        seen_before, accepted_before, then = request.counted
        left = _FORGETTING_OF_ALL ** (self._num_counted - then)
        share = _COUNTS_FOR / (_COUNTS_FOR + request.num_seen)
        seen, accepted = share * request.num_seen, share * request.num_accepted
        more = max(0.0, seen - seen_before) + _EACH * num_drafts
        keeps = _FORGETTING_OF_ALL**more
        self.num_seen = (self.num_seen - left * seen_before) * keeps + seen + _EACH * num_drafts
        self.num_accepted = (self.num_accepted - left * accepted_before) * keeps + accepted + _EACH * num_accepted
        self._num_counted += more
        request.counted = seen, accepted, self._num_counted

    def _learn(self, x: float, j: int, lead: float, stood: bool, expected: float) -> None:
        value = self.slope * x + self.intercepts[j] + self.request_weight * lead
        self.variance += _SPREAD_RATE * ((value - expected) ** 2 - self.variance)
        rate = _LEARNING_RATES[self.num_outcomes >= _LEARNED]
        sign = 1.0 if stood else -1.0
        gain = math.log1p(math.exp(-sign * expected)) - math.log1p(math.exp(-sign * value))
        self.gain += _SPREAD_RATE * (gain - self.gain)
        error = rate * (stood - 1.0 / (1.0 + math.exp(-value)))
        self.intercepts[j] += error
        slope = self.slope + error * x / _MOST_LOGIT
        self.slope = slope if 0.0 < slope < 3.0 else min(3.0, max(0.0, slope))
        weight = self.request_weight + error * lead
        self.request_weight = weight if 0.0 < weight < 2.0 else min(2.0, max(0.0, weight))


def contradicts(num_accepted: float, num_drafts: float, expected: float, deviations: float = _CONTRADICTS) -> bool:
    """Whether so many of some drafts stood that it is hard to believe that each was to with this probability: that is
    so many standard deviations away.

    With one draft more or less: of a few drafts, nearly all of which were expected to stand, one may fall.
    """
    off = num_accepted - num_drafts * expected
    return off * off > deviations**2 * (num_drafts * expected * (1.0 - expected) + 1.0)


@functools.cache
def _decay(num_drafts: int) -> tuple[float, float]:
    """What is left of what a request showed before so many drafts, and what they count for themselves, all of them."""
    keeps = _FORGETTING**num_drafts
    return keeps, (1.0 - keeps) / (1.0 - _FORGETTING)


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
