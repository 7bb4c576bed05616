"""What one model's passes take: by rows, sequences and KV tokens read."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

_LEARNING_RATE = 0.1  # of a node: some ten passes of one kind are believed
_SURPRISING = 0.2  # in the logarithm: of a pass that departs by more, less is believed
_STALE = 16  # passes learned from before a table is made anew
SHOWN = (1, 8, 32, 128)  # row counts, in a report


class PassShape(NamedTuple):
    """What a pass runs: so many rows of so many sequences, whose KV has so many tokens in the mean."""

    num_rows: int
    num_seqs: int
    context_len: float = 0.0


class PassSeconds:
    """Seconds of one model's pass: of n rows of B sequences with C tokens of KV each

        f(n) + B * per_sequence + g(B * C) + n * C * per_row_and_kv_token

    as a sequence's KV is read once, and each of its rows attends to all of it. f is linear between nodes, which are row
    counts, ascending from 1; beyond the last one the last two go on. g is `per_kv_token` of each, and
    `per_further_kv_token` more of those beyond `near_kv_tokens`, which the caches do not hold.

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
        per_further_kv_token: float = 0.0,
        near_kv_tokens: float = 0.0,
    ):
        if len(num_rows) < 2 or len(num_rows) != len(seconds):
            raise ValueError(f"num_rows and seconds must be two or more alike, got {len(num_rows)} and {len(seconds)}")
        if list(num_rows) != sorted(set(num_rows)) or num_rows[0] < 1:
            raise ValueError(f"num_rows must ascend from 1 or more, got {list(num_rows)}")
        others = (per_sequence, per_kv_token, per_row_and_kv_token, per_further_kv_token, near_kv_tokens)
        if not (all(0 < s < math.inf for s in seconds) and all(0 <= s < math.inf for s in others)):
            raise ValueError(f"seconds must be positive, got {list(seconds)}, and {others} besides")
        self.num_rows = list(num_rows)
        self.seconds = list(seconds)
        self.per_sequence = per_sequence
        self.per_kv_token = per_kv_token
        self.per_row_and_kv_token = per_row_and_kv_token
        self.per_further_kv_token = per_further_kv_token
        self.near_kv_tokens = near_kv_tokens
        self._table: list[float] = []
        self._num_learned = 0  # since the table was made

    def of(self, shape: PassShape) -> float:
        """Seconds of a pass; 0 of one without rows."""
        num_rows, num_seqs, context_len = shape
        if num_rows <= 0:
            return 0.0
        of_row = context_len * self.per_row_and_kv_token
        return self.of_rows(num_rows) + num_rows * of_row + self.of_sequences(num_seqs, context_len)

    def of_sequences(self, num_seqs: int, context_len: float) -> float:
        """What a pass takes for so many, however many rows they have."""
        num_kv_tokens = num_seqs * context_len
        further = max(0.0, num_kv_tokens - self.near_kv_tokens) * self.per_further_kv_token
        return num_seqs * self.per_sequence + num_kv_tokens * self.per_kv_token + further

    def of_rows(self, num_rows: int) -> float:
        """f(n), for one row or more."""
        i, weight = self.place(num_rows)
        low, high = self.seconds[i], self.seconds[i + 1]
        # Nodes that noise has turned round must not make a pass free.
        return max(low + weight * (high - low), 0.5 * min(low, high))

    def table(self, most_rows: int) -> list[float]:
        """f of 0 (which is 0), 1, ... at least `most_rows` rows, as it was some passes ago."""
        if len(self._table) <= most_rows or self._num_learned >= _STALE:
            self._num_learned = 0
            self._table = [0.0] + [self.of_rows(n) for n in range(1, max(most_rows + 1, len(self._table)))]
        return self._table

    def expire_table(self) -> None:
        """The next `table` is to be one of what is known by then."""
        self._num_learned = _STALE

    def move(self, logarithms: Sequence[float], of_kv: float = 0.0) -> None:
        """Each node by one of them, and by `of_kv` what sequences and their KV take."""
        self._num_learned += 1
        self.seconds = [s * math.exp(move) for s, move in zip(self.seconds, logarithms, strict=True)]
        factor = math.exp(of_kv)
        self.per_sequence *= factor
        self.per_kv_token *= factor
        self.per_further_kv_token *= factor

    def learn(self, num_rows: int, surprise: float, share: float = 1.0) -> None:
        """Move the nodes beside num_rows by a share of `surprise`, the logarithm of seen / expected."""
        self._num_learned += 1
        i, weight = self.place(num_rows)
        weight = min(1.0, max(0.0, weight))
        for node, of_node in ((i, 1.0 - weight), (i + 1, weight)):
            self.seconds[node] *= math.exp(of_node * share * believed(surprise))

    def scale(self, factor: float) -> None:
        """All passes take `factor` times as long as was thought."""
        self.seconds = [factor * seconds for seconds in self.seconds]
        self.per_sequence *= factor
        self.per_kv_token *= factor
        self.per_row_and_kv_token *= factor
        self.per_further_kv_token *= factor
        self.expire_table()

    def __str__(self) -> str:
        """'1.2 1.3 2.4 8.1 ms, 0.01 more a sequence, 0.02 more for 1,000 tokens of KV': by row counts."""
        of_rows = " ".join(f"{1e3 * self.of_rows(num_rows):.3g}" for num_rows in SHOWN)
        per_token = self.per_kv_token + self.per_row_and_kv_token  # of a row of each sequence
        more = [(1e3 * self.per_sequence, "a sequence"), (1e6 * per_token, "for 1,000 tokens of KV")]
        return f"{of_rows} ms" + "".join(f", {ms:.2g} more {what}" for ms, what in more if ms > 0)

    def as_list(self) -> list:
        """The arguments that make another one like it."""
        of_sequences = (self.per_sequence, self.per_kv_token, self.per_row_and_kv_token)
        return [list(self.num_rows), list(self.seconds), *of_sequences, self.per_further_kv_token, self.near_kv_tokens]

    def place(self, num_rows: int) -> tuple[int, float]:
        """The node before, and how far towards the next one; above 1 beyond the last, below 0 before the first."""
        i = min(max(bisect_right(self.num_rows, num_rows) - 1, 0), len(self.num_rows) - 2)
        low, high = self.num_rows[i], self.num_rows[i + 1]
        return i, (num_rows - low) / (high - low)


def believed(surprise: float) -> float:
    """What is learned of a surprise: the larger it is, the smaller the share (a Cauchy distribution's likelihood)."""
    return _LEARNING_RATE * surprise / (1.0 + (surprise / _SURPRISING) ** 2)
