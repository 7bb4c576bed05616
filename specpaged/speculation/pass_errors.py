"""What one model's passes depart from what was thought, told apart from how slow the machine is at the moment."""

from __future__ import annotations

import math

from specpaged.speculation.pass_seconds import PassSeconds

_PACE, _ERROR = 0.5, 0.15  # what is uncertain at first of the machine's pace, and of each error, in logarithms
_KV_ERROR, _KV_FADES = 0.5, 0.01  # as of errors, of what reading KV takes: it depends on what else is in the caches
_PER_OCTAVE = 2  # errors: passes of half as many rows more may be on another stair
_ALIKE = 0.5  # correlation of two errors that are an octave apart
_WANDERS, _FADES = 0.05, 1e-3  # of the pace, and of each error, from one pass that is seen to the next
_NOISE = 0.08  # of a pass
_SUSPICIOUS, _JUMP = 2.0, 3.0  # standard deviations
_AGREE = 0.3  # two passes that stand out by about as much
_BLAMED = 0.1  # of a jump: the more come with one kind of pass, the less is known of its error
_BLAMED_AGAIN = 1.0  # of one that, for the second time, undoes what came with another kind of pass


class PassErrors:
    """Refines a table of `PassSeconds` by what passes take, by a Kalman filter. All is in logarithms.

    A pass of n rows takes exp(drift + error(n)) times as long as thought. `drift` is the machine's pace, which wanders
    from pass to pass and is common to all. Errors stay: one for each half octave of rows, linear between them, the
    more alike the nearer they are. From passes of one kind the two cannot be told apart, nor need they; passes of two
    kinds, one soon after the other, say what one takes beside the other, however slow the machine is. What sequences
    and their KV take has an error of its own: rows of many sequences read more of it than as many rows of a few. What
    is found is put into the table, so that the errors that are left are 0 in the mean.

    A pass that stands out says nothing until the next one stands out like it. If they do so by far, the pace has
    jumped; but where it seems to jump with every pass of one kind, its error becomes uncertain, and is learned: soon,
    if it jumps as passes of another kind come, and back as they go, twice by as much. Once may be a neighbour.
    """

    def __init__(self, passes: PassSeconds):
        self.passes = passes
        self.drift = 0.0  # the logarithm of how much slower everything is than when it was probed
        nodes = range(2 + int(_PER_OCTAVE * math.log2(passes.num_rows[-1])))
        self._pace = _PACE**2  # its variance
        # Covariances with it, and of the errors: those by rows, and last the one of KV.
        self._with_pace = [0.0 for _ in (*nodes, "KV")]
        self._covariance = [[_ERROR**2 * _ALIKE ** (abs(a - b) / _PER_OCTAVE) for b in nodes] + [0.0] for a in nodes]
        self._covariance.append([0.0 for _ in nodes] + [_KV_ERROR**2])
        self._suspect = math.nan  # by how much the last pass stood out
        self._ordinary = 0  # rows of the last pass that did not stand out
        # The last one, if it came with passes of another kind, and their rows; and the one that undid such a jump, as
        # those went, until they come again.
        self._jump, self._came_with = math.nan, 0
        self._undoing, self._suspected = math.nan, 0
        self._places = [self._place(num_rows) for num_rows in passes.num_rows]

    def observe(self, num_rows: int, surprise: float, share: float = 1.0, kv_share: float = 0.0) -> None:
        """A pass of so many rows has taken exp(surprise) times as long as thought; rows are a `share` of that, and
        sequences and their KV another one.
        """
        i, weight = self._place(num_rows)
        parts = (i, share * (1.0 - weight)), (i + 1, share * weight), (-1, kv_share)
        self._pace += _WANDERS**2
        with_pace = self._pace + sum(part * self._with_pace[node] for node, part in parts)
        with_errors = [
            of_pace + sum(part * row[node] for node, part in parts)
            for of_pace, row in zip(self._with_pace, self._covariance, strict=True)
        ]
        variance = with_pace + sum(part * with_errors[node] for node, part in parts) + _NOISE**2
        innovation = surprise - self.drift
        suspect, self._suspect = self._suspect, math.nan
        if innovation**2 > _SUSPICIOUS**2 * variance:
            if not abs(innovation - suspect) < _AGREE:
                self._suspect = innovation
                return
            if innovation**2 > _JUMP**2 * variance:
                self._pace += innovation**2
                self._doubt_error(i + weight, self._blamed(num_rows, innovation) * innovation)
                self._ordinary = num_rows
                self.observe(num_rows, surprise, share, kv_share)  # no longer does it stand out
                return
        if not _are_alike(num_rows, self._ordinary):
            self._jump = math.nan
            if _are_alike(num_rows, self._suspected):
                self._undoing = math.nan
        self._ordinary = num_rows
        gain, last = with_pace / variance, len(self._covariance) - 1
        self.drift += gain * innovation
        self._pace -= gain * with_pace
        self._with_pace = [c - gain * other for c, other in zip(self._with_pace, with_errors, strict=True)]
        for node, (row, of_error) in enumerate(zip(self._covariance, with_errors, strict=True)):
            gain = of_error / variance
            row[:] = [c - gain * other for c, other in zip(row, with_errors, strict=True)]
            error, fades = (_KV_ERROR, _KV_FADES) if node == last else (_ERROR, _FADES)
            if row[node] < error**2:  # what is never seen is as uncertain as at first, and no more
                row[node] += fades**2
        found = [of_error / variance * innovation for of_error in with_errors]
        self.passes.move([found[i] + weight * (found[i + 1] - found[i]) for i, weight in self._places], found[-1])

    def doubt(self, num_rows: int, others: int) -> float:
        """The standard deviation of what passes of so many rows take beside passes of so many others."""
        (i, high), (j, minus_high) = self._place(num_rows), self._place(others)
        weights = [(i, 1.0 - high), (i + 1, high), (j, minus_high - 1.0), (j + 1, -minus_high)]
        variance = sum(v * w * self._covariance[a][b] for a, v in weights for b, w in weights)
        return math.sqrt(max(0.0, variance))

    @property
    def suspects(self) -> bool:
        """Whether the pace has come and gone with passes of another kind: the next ones say if that was by chance."""
        return not math.isnan(self._undoing)

    def _blamed(self, num_rows: int, jump: float) -> float:
        """The share of a jump that is put down to the passes with which it came."""
        before, self._jump = self._jump, math.nan
        if _are_alike(num_rows, self._ordinary):
            return _BLAMED
        if not abs(jump + before) < _AGREE:
            self._jump, self._came_with = jump, num_rows
            return _BLAMED
        comes_again = self.suspects and _are_alike(self._came_with, self._suspected)
        once, self._undoing = self._undoing, math.nan
        if not comes_again:
            self._undoing, self._suspected = jump, self._came_with
        return _BLAMED_AGAIN if comes_again and abs(jump - once) < _AGREE else _BLAMED

    def _doubt_error(self, node: float, deviation: float) -> None:
        """More is uncertain of the error there, and, as they are alike, of those around it."""
        nodes = range(len(self._covariance) - 1)
        deviations = [deviation * _ALIKE ** (abs(other - node) / _PER_OCTAVE) for other in nodes] + [0.0]
        for row, of_row in zip(self._covariance, deviations, strict=True):
            row[:] = [c + of_row * other for c, other in zip(row, deviations, strict=True)]

    def _place(self, num_rows: int) -> tuple[int, float]:
        """The error below, and how far towards the next one; beyond the last one is like the last one."""
        node = _PER_OCTAVE * min(math.log2(num_rows), math.log2(self.passes.num_rows[-1]))
        return int(node), node - int(node)


def _are_alike(num_rows: int, others: int) -> bool:
    """Whether passes of so many rows are of one kind with those of so many others; 0, of which there were none, are
    with all.
    """
    return not others or abs(math.log2(num_rows / others)) < 1 / _PER_OCTAVE
