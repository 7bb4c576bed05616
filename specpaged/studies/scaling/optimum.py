"""The draft size that promises most on a machine: laws of acceptance over what rounds were measured to cost.

As Scylla chooses its drafts (arXiv 2505.07858, its formulas are not public): acceptance grows with the logarithm of a
draft's size, its cost in a straight line. With E(N, K) tokens of a round by law, and R(N, K) = base + slope N seconds
of it at some batch, fitted to measured rounds, the speed over plain decoding is E(N, K) plain / R(N, K); its maximum
over N and K is looked for on a fine grid. numpy only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specpaged.studies.scaling.laws import Interval, Law

GRID = 201  # sizes that are looked at
BEYOND = 4.0  # how far outside of the measured sizes, as a factor
_SAMPLES = 400


@dataclass(frozen=True)
class RoundLine:
    """Seconds of a round by the draft's parameters, at one batch size and K: a straight line through measured ones."""

    base: float
    slope: float
    r_squared: float

    @classmethod
    def fit(cls, parameters: Sequence[float], seconds: Sequence[float]) -> RoundLine:
        """Of at least two sizes. Its relative errors are least, as a long round's noise is larger; it never falls."""
        x, y = np.asarray(parameters, float), np.asarray(seconds, float)
        weighted = np.stack([1 / y, x / y], 1)
        base, slope = np.linalg.lstsq(weighted, np.ones(len(y)), rcond=None)[0]
        if slope < 0:
            base, slope = float(y.mean()), 0.0
        left, total = ((y - base - slope * x) ** 2).sum(), ((y - y.mean()) ** 2).sum()
        return cls(float(base), float(slope), float(1 - left / total) if total > 0 else 1.0)

    def of(self, parameters: np.ndarray) -> np.ndarray:
        """Seconds, of each."""
        return self.base + self.slope * parameters


@dataclass(frozen=True)
class Optimum:
    """What promises most at a batch size: K = 0 where no draft does better than none."""

    batch_size: int
    num_drafts: int
    parameters: Interval  # within GRID
    speed: float  # over plain decoding
    is_inside: bool  # of the sizes that were measured

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "B": self.batch_size,
            "K": self.num_drafts,
            "parameters": [round(x) for x in self.parameters.as_list()],
            "speed": round(self.speed, 3),
            "is_inside": self.is_inside,
        }


class Speeds:
    """What every size and K promises at one batch size."""

    def __init__(self, laws: Mapping[int, Law], lines: Mapping[int, RoundLine], plain: float, measured: Sequence[int]):
        """`laws` and `lines` by K: tokens and seconds of a round by "parameters"; `plain`: seconds of a plain round;
        `measured`: the sizes that both were fitted to."""
        self.laws, self.lines, self.plain = laws, lines, plain
        self.smallest, self.largest = min(measured), max(measured)
        self.sizes = np.geomspace(self.smallest / BEYOND, self.largest * BEYOND, GRID)

    def at(self, parameters: np.ndarray, num_drafts: int) -> np.ndarray:
        """Speed over plain decoding, by size, as the law has it."""
        return self._speeds(self.laws[num_drafts].coefficients, parameters, num_drafts)

    def best_k(self, parameters: float) -> int:
        """The K that promises most at a size, of those there are laws of."""
        sizes = np.array([parameters])
        return max(self.laws, key=lambda k: (float(self.at(sizes, k)[0]), -k))

    def envelope(self) -> np.ndarray:
        """[GRID]: the speed at every size, at its best K."""
        return np.max([self.at(self.sizes, k) for k in self.laws], 0)

    def optimum(self, batch_size: int) -> Optimum:
        """The best size and K, and between which sizes it lies where the laws' samples are taken for the laws."""
        ks = sorted(self.laws)
        table = np.stack([self.at(self.sizes, k) for k in ks])  # [K, GRID]
        k_idx, size_idx = np.unravel_index(int(table.argmax()), table.shape)
        best = self.sizes[size_idx]
        of_samples = []
        for i in range(min(_SAMPLES, len(self.laws[ks[0]].samples))):
            each = [self._speeds(self.laws[k].samples[i], self.sizes, k) for k in ks]
            of_samples.append(self.sizes[int(np.max(each, 0).argmax())])
        low, high = np.percentile(of_samples, [2.5, 97.5])
        speed = float(table.max())
        return Optimum(
            batch_size,
            ks[k_idx] if speed > 1 else 0,
            Interval(float(best), min(float(best), float(low)), max(float(best), float(high))),
            speed,
            bool(self.smallest <= best <= self.largest),
        )

    def _speeds(self, coefficients: np.ndarray, parameters: np.ndarray, k: int) -> np.ndarray:
        tokens = coefficients[0] + coefficients[1] * np.log2(parameters)
        tokens = np.clip(tokens, 1.0, k + 1.0)  # a round has one token at least, and K + 1 at most
        return tokens * self.plain / self.lines[k].of(parameters)
