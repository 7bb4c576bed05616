"""What one model's passes take on this machine, timed shape by shape."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from statistics import mean, median
from typing import Any, NamedTuple

from specpaged.modeling.model_runner import ModelRunner
from specpaged.modeling.ragged_batch import RaggedRow
from specpaged.speculation.pass_seconds import PassSeconds

# Rows that are timed, in this order while there is time: few are not on a line, but on stairs, as kernels work in tiles
# of so many rows, and a row beyond a tile's last one takes another tile.
ROWS = (1, 8, 16, 32, 64, 2, 4, 6, 7, 12, 3, 13, 24, 18, 9, 10, 19, 25, 48, 36, 15, 31, 5, 20, 128, 256, 512)
# Passes of more rows are on a line with the last ones: they are timed once, and only if that leaves most of the time,
# which is taken to be so many times what the longest one so far took.
_MANY, _SPARE = 128, 8.0
NUM_NEW = 4  # tokens of a sequence that there is room for, at least
_CONTEXT = 256  # tokens, of the passes that say what reading KV takes
_SEQUENCES, _FEW = 32, 8  # at most, of the passes that say what sequences and their KV take
_KV_BYTES = 1 << 28  # at most, of their KV
_SEVERAL = 4  # rows of a sequence, of the pass that says what a further one takes
_FEW_ROWS, _TIMES = 8, 3  # and how often passes of so few are measured at once, once they were run
_STANDS_OUT = 2.0  # times as long as passes of fewer rows that have as many in all
_POLISHING = 4  # times, by turns of shapes and of turns


class Shape(NamedTuple):
    """Of a pass whose sequences are all alike."""

    num_seqs: int
    num_rows: int  # of each
    context_len: int = 0  # tokens of KV of each, before them

    @property
    def is_of_few_rows(self) -> bool:
        """Whether its passes differ by what others leave in the caches."""
        return self.num_seqs * self.num_rows <= _FEW_ROWS


class PassTimer:
    """The usual seconds of one model's passes, by shape: memory is not always as quick as it can be.

    Rows are of one sequence, where sequences `have_several`.
    """

    def __init__(
        self, runner: ModelRunner, most_rows: int, run: Callable[[list[RaggedRow]], float], have_several: bool = True
    ):
        self.runner = runner
        self.run = run
        cache = runner.kv_cache
        longest = min(_CONTEXT, cache.num_slots, runner.model.max_model_len)  # of a sequence
        self.context_len = max(0, longest - NUM_NEW)
        most_seqs = max(2, min(most_rows // 4, _KV_BYTES // (longest * cache.bytes_per_token)))
        self.num_seqs = next(n for n in (_SEQUENCES, 16, _FEW, 4, 2) if n <= most_seqs)
        self._num_few = min(_FEW, self.num_seqs)
        together = longest if have_several else 0
        of_rows = [Shape(1, n) if n <= together else Shape(n, 1) for n in ROWS if n <= max(8, most_rows)]
        self._rows = {shape: shape.num_seqs * shape.num_rows for shape in of_rows}
        # The same sequences without their KV, and with it.
        kinds = [(self.num_seqs, 1)]
        kinds += [(_FEW, 1)] if self.num_seqs > _FEW else []
        kinds += [(self._num_few, _SEVERAL)] if have_several else []
        contexts = (0, self.context_len) if self.context_len else ()
        self._of_sequences = [Shape(*kind, context_len) for kind in kinds for context_len in contexts]
        self.shapes = [*of_rows[:3], *self._of_sequences, *of_rows[3:]]
        self._measured: dict[Shape, list[tuple[int, float]]] = {}  # seconds, with the turn in which it took them
        self._turn = 0  # of some passes soon one after the other
        self._took: dict[Shape, float] = {}  # seconds that it takes to measure each, at the least

    @property
    def seconds(self) -> dict[Shape, float]:
        """Medians, as yet."""
        return {shape: median([seconds for _, seconds in passes]) for shape, passes in self._measured.items()}

    def begin(self, left: Callable[[], float]) -> None:
        """Every shape once, as long as there is time; two of them in any case. Again, what somebody was in the way of:
        passes of very many rows have no other turn, and say what rows beyond them take.
        """
        cache = self.runner.kv_cache
        for layer in cache.layers:  # memory that nobody has written to is one page, in the nearest cache
            layer[cache.block_size : cache.block_size + self.num_seqs * (_CONTEXT + cache.block_size)].zero_()
        self.run(sequences(self.runner, Shape(1, 1)))  # there may be something to build
        for shape in self.shapes:
            needed = _SPARE if self._rows.get(shape, 0) > _MANY else 2.0
            if len(self._measured) >= 2 and left() < needed * max(self.seconds.values()):
                break
            self.again(shape)
            if self._stands_out(shape):
                self.again(shape)
                self._measured[shape] = [min(self._measured[shape], key=itemgetter(1))]

    def _stands_out(self, shape: Shape) -> bool:
        """Whether it took far longer than some passes of fewer rows would that have as many in all."""
        num_rows, seconds = self._rows.get(shape, 0), self._measured[shape][0][1]
        others = [(self._rows.get(other, num_rows), of[0][1]) for other, of in self._measured.items()]
        return any(seconds > _STANDS_OUT * of_other * num_rows / n for n, of_other in others if n < num_rows)

    def again(self, shape: Shape) -> None:
        """One of them once more."""
        start = time.perf_counter()
        self._measured.setdefault(shape, []).append((self._turn, self.run(sequences(self.runner, shape))))
        self._took[shape] = min(time.perf_counter() - start, self._took.get(shape, math.inf))

    def few_rows(self, shapes: Sequence[Shape], left: Callable[[], float]) -> list[Shape]:
        """Of these the ones of a few rows, again and again as in a run of steps, and measured from the second time on:
        behind a pass of many rows caches hold less. Returns the others.
        """
        few = [shape for shape in reversed(shapes) if shape.is_of_few_rows]
        for time_of_it in range(1 + _TIMES):
            for shape in few:
                if left() <= 0:
                    break
                if time_of_it == 0:
                    self.run(sequences(self.runner, shape))
                else:
                    self.again(shape)
        return [shape for shape in shapes if shape not in few]

    def quick(self, seconds: float, in_runs: bool = False) -> list[Shape]:
        """The quickest ones, measured in this time all together, which are the next turn; those whose differences are
        to be known count half, and those of a few rows more if they go by `few_rows`. Of very many rows there is none.
        """
        self._turn += 1
        weights = {shape: 0.5 if shape in self._of_sequences else 1.0 for shape in self._took}
        by_seconds = sorted((s * weights[shape], shape) for shape, s in self.seconds.items())
        quickest = []
        for _, shape in by_seconds:
            seconds -= weights[shape] * self._took[shape] * (1 + _TIMES if in_runs and shape.is_of_few_rows else 1)
            if seconds < 0:
                break
            quickest.append(shape)
        return sorted(shape for shape in quickest if self._rows.get(shape, 0) <= _MANY)

    def pass_seconds(self) -> PassSeconds:
        """What the shapes came to."""
        of_shapes, num_seqs = self._usual(), self.num_seqs
        by_rows = sorted((num_rows, of_shapes[shape]) for shape, num_rows in self._rows.items() if shape in of_shapes)
        num_rows = [n for n, _ in by_rows]
        seconds = _rising([s for _, s in by_rows])
        of_kv = self._kv_seconds(of_shapes, num_seqs, 1)
        if of_kv is None:
            return PassSeconds(num_rows, seconds)
        together = of_shapes.get(Shape(1, num_seqs), math.inf)
        per_sequence = max(0.0, of_shapes[Shape(num_seqs, 1)] - together) / (num_seqs - 1)
        num_kv_tokens = num_seqs * self.context_len
        per_token = of_kv / num_kv_tokens
        of_few, of_several = (self._kv_seconds(of_shapes, self._num_few, n) for n in (1, _SEVERAL))
        near = self._num_few * self.context_len
        per_row = 0.0
        if of_few is not None and of_several is not None:
            per_row = min(per_token, max(0.0, of_several - of_few) / near / (_SEVERAL - 1))
            seconds = self._without_own_kv(num_rows, seconds, per_row)
        if of_few is None or num_seqs <= _FEW:
            return PassSeconds(num_rows, seconds, per_sequence, per_token - per_row, per_row)
        near_token = min(per_token, max(per_row, of_few / near))
        further = (per_token - near_token) * num_kv_tokens / (num_kv_tokens - near)
        return PassSeconds(num_rows, seconds, per_sequence, near_token - per_row, per_row, further, near)

    def _without_own_kv(self, num_rows: Sequence[int], seconds: Sequence[float], per_row: float) -> list[float]:
        """Less what rows of one sequence take that attend to those before them, n (n - 1) / 2 of n: rows of several
        sequences, of which a step's are, do not.
        """
        together = {n for shape, n in self._rows.items() if shape.num_rows > 1}
        own = [n * (n - 1) / 2 * per_row if n in together else 0.0 for n in num_rows]
        return _rising([max(s / 2, s - of_own) for s, of_own in zip(seconds, own, strict=True)])

    def _kv_seconds(self, of_shapes: dict[Shape, float], num_seqs: int, num_rows: int) -> float | None:
        """What these sequences' KV takes; None where that has not been timed."""
        with_kv, without = (Shape(num_seqs, num_rows, context_len) for context_len in (self.context_len, 0))
        if not self.context_len or with_kv not in of_shapes or without not in of_shapes:
            return None
        return max(0.0, of_shapes[with_kv] - of_shapes[without])

    def _usual(self) -> dict[Shape, float]:
        """What passes of each shape take beside others of the same turn: a machine is now quicker, now slower, for all
        alike (Tukey's median polish, of logarithms).
        """
        passes = [(turn, shape, math.log(s)) for shape, of_shape in self._measured.items() for turn, s in of_shape]
        usual = {shape: math.log(of_shape[0][1]) for shape, of_shape in self._measured.items()}  # all of the first turn
        for _ in range(_POLISHING):
            pace = _medians((turn, log - usual[shape]) for turn, shape, log in passes)
            usual = _medians((shape, log - pace[turn]) for turn, shape, log in passes)
        return {shape: math.exp(log) for shape, log in usual.items()}


def sequences(runner: ModelRunner, shape: Shape) -> list[RaggedRow]:
    """Those of a shape, on KV of their own as far as there is some: what it holds is nobody's."""
    cache = runner.kv_cache
    each = -(-(shape.context_len + max(shape.num_rows, NUM_NEW)) // cache.block_size)
    firsts = [1 + i * each % (cache.num_blocks - each + 1) for i in range(shape.num_seqs)]
    token_ids = [1] * shape.num_rows
    return [RaggedRow(token_ids, shape.context_len, range(n, n + each), shape.num_rows) for n in firsts]


def _medians(values: Iterable[tuple[Any, float]]) -> dict[Any, float]:
    """Of the values of each key."""
    of_key: dict[Any, list[float]] = {}
    for key, value in values:
        of_key.setdefault(key, []).append(value)
    return {key: median(of) for key, of in of_key.items()}


def _rising(seconds: Sequence[float]) -> list[float]:
    """The nearest ones that never fall: more rows are never quicker, and if they seem so, somebody was in the way."""
    runs: list[list[float]] = []
    for value in seconds:
        runs.append([value])
        while len(runs) > 1 and mean(runs[-2]) > mean(runs[-1]):
            runs[-2:] = [runs[-2] + runs[-1]]
    return [mean(run) for run in runs for _ in run]
