"""What a step takes on this machine: passes by rows and by KV tokens read, measured, and refined while running."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

_LEARNING_RATE = 0.1  # of a node: some ten passes of one kind are believed
_SURPRISING = 0.2  # in the logarithm: of a pass that departs by more, less is believed
_NUM_RECENT = 31  # passes whose median says what all have in common
_NUM_NEWEST = 5  # of them, whose median says how busy the machine is at this moment
_MEDIAN_EVERY = 8  # passes
_WAIT = 10
_SHIFT = 0.05  # in the logarithm: a median beyond it is no noise
_STALE = 16  # passes learned from before a table is made anew
_BESIDES = ("seconds_per_proposal", "seconds_per_step", "seconds_per_drafting", "seconds_per_sequence", "seconds_saved")
_SHOWN = (1, 8, 32, 128)  # row counts, in a report


class PassShape(NamedTuple):
    """What a pass runs: so many rows of so many sequences, whose KV has so many tokens in the mean."""

    num_rows: int
    num_seqs: int
    context_len: float = 0.0


class PassSeconds:
    """Seconds of one model's pass: of n rows of B sequences with C tokens of KV each

        f(n) + B * per_sequence + C * (B * per_kv_token + n * per_row_and_kv_token)

    as a sequence's KV is read once, and each of its rows attends to all of it. f is linear between nodes, which are row
    counts, ascending from 1; beyond the last one the last two go on.

    Raises:
        ValueError: nodes that are no such table.
    """

    def __init__(
        self,
        num_rows: Sequence[int],
        seconds: Sequence[float],
        per_sequence: float = 0.0,
        per_kv_token: float = 0.0,
        per_row_and_kv_token: float = 0.0,
    ):
        if len(num_rows) < 2 or len(num_rows) != len(seconds):
            raise ValueError(f"num_rows and seconds must be two or more alike, got {len(num_rows)} and {len(seconds)}")
        if list(num_rows) != sorted(set(num_rows)) or num_rows[0] < 1:
            raise ValueError(f"num_rows must ascend from 1 or more, got {list(num_rows)}")
        if min(*seconds) <= 0 or min(per_sequence, per_kv_token, per_row_and_kv_token) < 0:
            others = (per_sequence, per_kv_token, per_row_and_kv_token)
            raise ValueError(f"seconds must be positive, got {list(seconds)}, and {others} besides")
        self.num_rows = list(num_rows)
        self.seconds = list(seconds)
        self.per_sequence = per_sequence
        self.per_kv_token = per_kv_token
        self.per_row_and_kv_token = per_row_and_kv_token
        self._table: list[float] = []
        self._num_learned = 0  # since the table was made

    def of(self, shape: PassShape) -> float:
        """Seconds of a pass; 0 of one without rows."""
        num_rows, num_seqs, context_len = shape
        if num_rows <= 0:
            return 0.0
        of_sequence = self.per_sequence + context_len * self.per_kv_token
        return self.of_rows(num_rows) + num_seqs * of_sequence + num_rows * context_len * self.per_row_and_kv_token

    def of_rows(self, num_rows: int) -> float:
        """f(n), for one row or more."""
        i, weight = self._place(num_rows)
        low, high = self.seconds[i], self.seconds[i + 1]
        # Nodes that noise has turned round must not make a pass free.
        return max(low + weight * (high - low), 0.5 * min(low, high))

    def table(self, most_rows: int) -> list[float]:
        """f of 0 (which is 0), 1, ... at least `most_rows` rows, as it was some passes ago."""
        if len(self._table) <= most_rows or self._num_learned >= _STALE:
            self._num_learned = 0
            self._table = [0.0] + [self.of_rows(n) for n in range(1, max(most_rows + 1, len(self._table)))]
        return self._table

    def learn(self, num_rows: int, surprise: float, share: float = 1.0) -> None:
        """Move the nodes beside num_rows by a share of `surprise`, the logarithm of seen / expected."""
        self._num_learned += 1
        i, weight = self._place(num_rows)
        weight = min(1.0, max(0.0, weight))
        for node, of_node in ((i, 1.0 - weight), (i + 1, weight)):
            self.seconds[node] *= math.exp(of_node * share * _believed(surprise))

    def scale(self, factor: float) -> None:
        """All passes take `factor` times as long as was thought."""
        self.seconds = [factor * seconds for seconds in self.seconds]
        self.per_sequence *= factor
        self.per_kv_token *= factor
        self.per_row_and_kv_token *= factor
        self._num_learned = _STALE

    def __str__(self) -> str:
        """'1.2 1.3 2.4 8.1': milliseconds by row counts."""
        return " ".join(f"{1e3 * self.of_rows(num_rows):.3g}" for num_rows in _SHOWN)

    def as_list(self) -> list:
        """The arguments that make another one like it."""
        others = (self.per_sequence, self.per_kv_token, self.per_row_and_kv_token)
        return [list(self.num_rows), list(self.seconds), *others]

    def _place(self, num_rows: int) -> tuple[int, float]:
        """The node before, and how far towards the next one; above 1 beyond the last, below 0 before the first."""
        i = min(max(bisect_right(self.num_rows, num_rows) - 1, 0), len(self.num_rows) - 2)
        low, high = self.num_rows[i], self.num_rows[i + 1]
        return i, (num_rows - low) / (high - low)


class CostModel:
    """The target's passes, the drafter's if a model drafts, and what a step and a proposal take besides, in seconds.

    Beside the passes, a step of B sequences takes `rest(B)`. A proposal for n of them takes `proposal(n)`: whatever is
    added to a step that drafts, and is no pass. `seconds_saved` is what a target's pass of one row takes less where no
    drafter has run since the last one: of the target's weights more are in the caches.

    Decisions compare. A neighbour on the machine slows everything alike: what the target's last passes have in common
    is a `drift`, which changes no comparison. What proposals, or the rest of a step, depart from that is learned: at
    once, where most of the last ones show it; else slowly, and hardly from a single one that stands out.
    """

    def __init__(
        self,
        target: PassSeconds,
        draft: PassSeconds | None = None,
        seconds_per_proposal: float = 0.0,
        seconds_per_step: float = 0.0,
        *,
        seconds_per_drafting: float = 0.0,  # sequence
        seconds_per_sequence: float = 0.0,  # and step
        seconds_saved: float = 0.0,
    ):
        self.target = target
        self.draft = draft
        self.seconds_per_proposal = seconds_per_proposal
        self.seconds_per_step = seconds_per_step
        self.seconds_per_drafting = seconds_per_drafting
        self.seconds_per_sequence = seconds_per_sequence
        self.seconds_saved = seconds_saved
        self._of_target, self._of_proposals, self._of_rest = _Surprises(), _Surprises(), _Surprises()

    def __str__(self) -> str:
        """A line, as the costs are known now."""
        draft = "" if self.draft is None else f", of the draft {self.draft} ms"
        return (
            f"passes of {' '.join(map(str, _SHOWN))} rows {self.target} ms{draft}; "
            f"besides, {1e3 * self.proposal(1):.2g} to {1e3 * self.proposal(_SHOWN[-1]):.2g} ms a proposal, "
            f"{1e3 * self.rest(1):.2g} to {1e3 * self.rest(_SHOWN[-1]):.2g} a step"
        )

    def rest(self, num_seqs: int) -> float:
        """Of a step, beside its passes."""
        return self.seconds_per_step + num_seqs * self.seconds_per_sequence

    def proposal(self, num_seqs: int) -> float:
        """Of a proposal for so many, beside its passes."""
        return self.seconds_per_proposal + num_seqs * self.seconds_per_drafting

    def saved(self, num_seqs: int) -> float:
        """Of a plain step's pass: the less, the more it has to compute beside reading the weights."""
        return self.seconds_saved * self.target.of_rows(1) / self.target.of_rows(num_seqs)

    def target_seconds(self, shape: PassShape) -> float:
        """Of a target's pass, in a run of others like it."""
        return self.target.of(shape) - (self.saved(shape.num_seqs) if shape.num_rows == shape.num_seqs else 0.0)

    @property
    def drift(self) -> float:
        """The logarithm of how much slower everything is now than when it was probed."""
        return self._of_target.median

    def observe_target(self, shape: PassShape, seconds: float) -> None:
        """A target pass has taken so long."""
        if shape.num_rows > 0 and seconds > 0:
            surprise = math.log(seconds / self.target_seconds(shape))
            self._of_target.add(surprise)
            self.target.learn(shape.num_rows, surprise - self.drift)

    def observe_proposal(
        self, passes: Sequence[PassShape], seconds: float, num_seqs: int = 0, rest_seconds: float = 0.0
    ) -> None:
        """A proposal of such passes has taken so long, and the rest of the step, of so many sequences, so long.

        What the rest takes more than in a step without drafts is on the proposal's account.
        """
        draft, busy = self.draft, self._of_target.newest
        usual = math.exp(busy) * self.rest(num_seqs)
        if 0 < rest_seconds < _WAIT * usual:
            seconds += rest_seconds - usual
        of_passes = [0.0 if draft is None else draft.of(shape) for shape in passes]
        besides = self.proposal(passes[0].num_seqs) if passes else self.seconds_per_proposal
        expected = besides + sum(of_passes)
        if not (seconds > 0 and expected > 0):
            return
        surprise = math.log(seconds / expected) - busy
        self._of_proposals.add(surprise)
        factor = self._of_proposals.take_shift()
        shifted = factor != 1.0
        if not shifted:
            factor = math.exp(besides / expected * _believed(surprise))
        self.seconds_per_proposal *= factor
        self.seconds_per_drafting *= factor
        if shifted:
            if draft is not None:
                draft.scale(factor)
        elif draft is not None:
            for shape, of_pass in zip(passes, of_passes, strict=True):
                if shape.num_rows > 0:
                    draft.learn(shape.num_rows, surprise, of_pass / expected)

    def observe_rest(self, seconds: float, num_seqs: int = 0) -> None:
        """A step without drafts, of so many sequences, has taken so long beside its pass.

        What is ten times as long as expected was a wait.
        """
        expected = self.rest(num_seqs)
        if 0 < seconds < _WAIT * expected:
            self._of_rest.add(math.log(seconds / expected) - self._of_target.newest)
            factor = self._of_rest.take_shift()
            self.seconds_per_step *= factor
            self.seconds_per_sequence *= factor

    def as_dict(self) -> dict:
        """Plain data, as `of_dict` reads it."""
        passes = {name: getattr(self, name) for name in ("target", "draft")}
        besides = {name: getattr(self, name) for name in _BESIDES}
        return {name: None if of_name is None else of_name.as_list() for name, of_name in passes.items()} | besides

    @classmethod
    def of_dict(cls, values: Mapping) -> CostModel:
        """The reverse of `as_dict`. ValueError, KeyError or TypeError if it is none."""
        passes = [None if values[name] is None else PassSeconds(*values[name]) for name in ("target", "draft")]
        return cls(*passes, **{name: float(values[name]) for name in _BESIDES})


class _Surprises:
    """The logarithms of seen / expected of the last passes of one kind, and their median, as it was some passes ago."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=_NUM_RECENT)
        self._num_seen = 0
        self.median = 0.0

    def add(self, surprise: float) -> None:
        self._last.append(surprise)
        self._num_seen += 1
        if self._num_seen % _MEDIAN_EVERY == 1:
            self.median = median(self._last)

    @property
    def newest(self) -> float:
        """The median of the last few."""
        return median(list(self._last)[-_NUM_NEWEST:]) if self._last else 0.0

    def take_shift(self) -> float:
        """The factor that most of the last passes show, which is expected from now on; 1 as long as there is none."""
        if self._num_seen < _NUM_RECENT // 2 or abs(self.median) < _SHIFT:
            return 1.0
        factor = math.exp(self.median)
        self._last.clear()
        self._num_seen, self.median = 0, 0.0
        return factor


def _believed(surprise: float) -> float:
    """What is learned of a surprise: the larger it is, the smaller the share (a Cauchy distribution's likelihood)."""
    return _LEARNING_RATE * surprise / (1.0 + (surprise / _SURPRISING) ** 2)
