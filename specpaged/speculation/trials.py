"""Trials of other steps than those that pay, to find out what they take: where drafting is believed to gain little."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from specpaged.speculation.cost_model import CostModel
from specpaged.speculation.octave import octave_of
from specpaged.speculation.pass_errors import PassErrors
from specpaged.speculation.selection import Chances, select
from specpaged.speculation.step_times import StepTimes

TRIAL_STEPS, ROWS_TRIAL_STEPS = 4, 2  # of rows, of which the first one is heard, too
_DOUBTS = 2.0  # standard deviations: who gains more by drafting need not ask what other steps take
_DOUBT = 0.03  # at least, in the logarithm of speed
_FIRST, _LATER = 16, 256  # steps that draft between two of one kind; twice as many after each
_SELDOM, _SELDOM_LATER = 128, 1024  # and of none where it is beyond doubt: that, too, is only believed
_TOLD_APART = 1.15  # times as many rows: fewer would not be told apart
# In doubt of the rest, of a step: less of it makes no difference; and trials at most, in batches of an octave.
_REST_DOUBT, _MOST_IN_DOUBT = 0.01, 6
_LEAST = 0.2  # of a plain step, what a trial of rows costs: were they free, nobody would look any more
# Of the time, where nothing is drafted, beside what is in advance; and as long as there were but a few in batches of an
# octave: one alone may have come with a neighbour.
_TRYING_ROWS, _AT_FIRST, _FEW_TRIED = 0.001, 0.003, 3


class _Turns:
    """Of one kind of trial: the first one after so many steps that draft, and each time twice as many."""

    def __init__(self, first: int, later: int = _LATER):
        self._num_untried, self._every, self._first, self._later = 0, first, first, later
        self._before = first

    def pass_by(self, num_steps: int) -> bool:
        """So many steps without one; whether it is due."""
        self._num_untried += num_steps
        return self._num_untried >= self._every

    def take(self) -> None:
        """It was this one's turn."""
        self._before = self._every
        self._num_untried, self._every = 0, min(self._later, 2 * self._every)

    def repeat(self) -> None:
        """It was cut short: it is due again as soon as it was."""
        self._every = self._before

    def hasten(self) -> None:
        """It is due as soon as the first one was, at the latest."""
        self._every = min(self._every, self._first)

    def hurry(self) -> None:
        """It is due after as many steps as the first one of all, at the latest."""
        self._num_untried = max(self._num_untried, self._every - _FIRST)

    def put_off(self) -> None:
        """There was nothing to try, or it has been tried by another."""
        self._num_untried = 0


class Trials:
    """Says when one is due, and of what.

    Who drafts in every step sees one kind of pass, and cannot tell an error of what it takes from a slow machine: now
    and then no drafts are tried, or half of them, and more. Nor can who never drafts: there, rows are tried, of
    whatever tokens, as drafts of a model that has fallen behind would take far longer.
    """

    def __init__(self, errors: PassErrors):
        self.errors = errors
        self._of_fewer, self._of_more = _Turns(_FIRST), _Turns(2 * _FIRST)
        self._of_none = _Turns(_SELDOM, _SELDOM_LATER)
        self._num_in_doubt: Counter[int] = Counter()  # trials, by the octave of the number of sequences
        self._last: _Turns | None = None  # whose turn it was; of rows, nobody's
        self._halves = False  # whether the last one of fewer was not of none
        self._credit = self._price = 0.0  # seconds for trials of rows, and what the next one takes
        self._num_seqs = 0  # of the plan before, if nothing was drafted then
        self._num_tried: Counter[int] = Counter()  # of rows, by the octave: the first one is in advance

    def next(
        self,
        counts: Sequence[int],
        speed: float,
        num_steps: int,
        expected: Callable[[], tuple[Chances, StepTimes]],
        proposal_seconds: float = 0.0,
        rest_doubt: float = 0.0,
    ) -> list[int] | None:
        """The drafts of one that is due: half of these or none, by turns, or twice as many. None where none is due.

        So many steps with such drafts there were since last, so many times as fast as plain ones, as is believed.
        `expected` says what comes of all drafts that there could be, and what steps with them take; a proposal takes
        `proposal_seconds` beside its passes. What plain steps take beside theirs may be in doubt: then a few trials
        come soon, none of whose steps draft. And where a neighbour may have come and gone with one, the next is soon.
        """
        octave = octave_of(len(counts))
        if rest_doubt < _REST_DOUBT or self._num_in_doubt[octave] >= _MOST_IN_DOUBT:
            rest_doubt = 0.0
        else:
            self._of_fewer.hasten()
        self._last = None
        if self.errors.suspects:
            self._of_fewer.hurry()
            self._of_none.hurry()
        kinds = self._of_fewer, self._of_more, self._of_none
        fewer_is_due, more_is_due, none_is_due = [turns.pass_by(num_steps) for turns in kinds]
        if fewer_is_due and self._is_in_doubt(counts, speed, rest_doubt):
            self._take(self._of_fewer)
            self._of_none.put_off()
            self._num_in_doubt[octave] += rest_doubt > 0.0
            return self._fewer(counts, rest_doubt)
        if fewer_is_due:
            self._of_fewer.put_off()
            if none_is_due:
                self._take(self._of_none)
                return [0] * len(counts)
        if more_is_due:
            self._take(self._of_more)
            return self._more(counts, *expected(), proposal_seconds)
        return None

    def drafts_are_made(self) -> None:
        """The next plain steps have nothing to be compared with at first."""
        self._num_seqs = 0

    def was_cut_short(self, num_steps: int) -> None:
        """Of the last one too little was heard: the sequences have changed behind so many steps."""
        if self._last is None:  # it was one of rows, and has taken as much of its price
            self._credit = max(self._credit, self._price * (1.0 - num_steps / ROWS_TRIAL_STEPS))
        else:
            self._last.repeat()

    def _take(self, turns: _Turns) -> None:
        turns.take()
        self._last = turns

    def _is_in_doubt(self, counts: Sequence[int], speed: float, rest_doubt: float) -> bool:
        """Whether these drafts may gain nothing."""
        doubt = math.hypot(self.errors.doubt(len(counts), len(counts) + sum(counts)), rest_doubt)
        return math.log(speed) < _DOUBTS * max(_DOUBT, doubt)

    def _fewer(self, counts: Sequence[int], rest_doubt: float) -> list[int]:
        """By turns half of the drafts and no drafts; no drafts, as long as the rest is in doubt."""
        self._halves = not (self._halves or rest_doubt) and max(counts) > 1
        return [(count + 1) // 2 if self._halves else 0 for count in counts]

    def _more(
        self, counts: Sequence[int], chances: Chances, times: StepTimes, proposal_seconds: float
    ) -> list[int] | None:
        """Twice as many, where more would be best if further rows took less, by as much as is in doubt.

        Of who drafts: it is what passes take that is to be found out, and others would have to catch up first.
        """
        num_drafts, verify = sum(counts), times.verify
        num_rows = len(counts) + num_drafts
        doubt = self.errors.doubt(num_rows, num_rows + num_drafts)
        if doubt <= _DOUBT:
            return None
        further = [max(verify[num_drafts], math.exp(-_DOUBTS * doubt) * seconds) for seconds in verify[num_drafts:]]
        hoped_for = _best(chances, [*verify[:num_drafts], *further], times, times.plain, proposal_seconds)
        more = [min(2 * count, len(of_sequence)) for count, of_sequence in zip(counts, chances, strict=True)]
        num_more = min(sum(hoped_for), sum(more))
        return more if len(counts) + num_more >= _TOLD_APART * num_rows else None

    def next_rows(
        self, num_seqs: int, seconds: float, hopeful: Callable[[float], Sequence[int]], price: Callable[[int], float]
    ) -> list[int] | None:
        """The rows of one that is due, as drafts of each sequence; None as long as there is none.

        The last steps took so many `seconds`. `hopeful` says what would be drafted if passes with drafts took less than
        is thought by a factor whose logarithm it is given: half of that is tried, but at least a row of each sequence,
        as less could not be told from none. `price` is what so many more rows take in a trial.
        """
        self._last = None
        octave = octave_of(num_seqs)
        num_tried = self._num_tried[octave]
        self._credit += (_TRYING_ROWS if num_tried >= _FEW_TRIED else _AT_FIRST) * seconds
        # Of a batch that lasts: one that runs empty will not have it back, and a new one compares with nothing.
        is_in_advance = not num_tried and num_seqs == self._num_seqs
        self._num_seqs = num_seqs
        if not is_in_advance and self._credit < self._price:
            return None
        doubt = self.errors.doubt(num_seqs, 3 * num_seqs)
        counts = hopeful(_DOUBTS * doubt) if doubt > _DOUBT else []
        if not any(counts):
            self._credit = 0.0
            return None
        counts = [max(1, (count + 1) // 2) for count in counts]
        self._price = price(sum(counts))
        if not is_in_advance and self._credit < self._price:
            return None
        self._num_tried[octave] += 1
        self._credit = 0.0
        return counts


def hopeful(chances: Chances, times: StepTimes, by: float) -> list[int]:
    """The drafts that would be best, if passes with drafts took exp(by) times less than is thought."""
    return _best(chances, times.verify, times, math.exp(by) * times.plain)


def price_of_rows(costs: CostModel, times: StepTimes, num_seqs: int, num_rows: int) -> float:
    """Seconds that a trial of so many rows more takes, each of whose rounds is a step of its own."""
    alone = costs.rest(num_seqs) - costs.rest(num_seqs, costs.drafting_rounds) / costs.drafting_rounds
    more = times.verify[num_rows] + alone - times.plain
    return max(_LEAST * times.plain, ROWS_TRIAL_STEPS * more)


def _best(
    chances: Chances,
    verify_seconds: Sequence[float],
    times: StepTimes,
    plain_seconds: float,
    proposal_seconds: float = 0.0,
) -> list[int]:
    passes = (times.first, times.later) if times.later else ()
    return select(
        chances, verify_seconds, passes, proposal_seconds=proposal_seconds, plain_seconds=plain_seconds
    ).counts
