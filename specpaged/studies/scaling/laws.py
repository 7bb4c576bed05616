"""Log-linear laws, fitted by least squares, with bootstrap intervals. numpy only.

    value = c_0 + c_1 log2 x_1 + c_2 log2 x_2 + ...

A coefficient is what the value gains each time a variable doubles. Intervals are of 95 %, percentiles of fits to what
might have been measured as well: values of resampled measurements where there are such (`replicates`), and on the
fitted law residuals drawn with replacement, each scaled by its leverage. From few points percentiles come out too
narrow, and are widened as Student's quantile is wider than the normal one (Hesterberg 2015, arXiv 1411.5279).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Point = Mapping[str, float]
NUM_SAMPLES = 2000
CONFIDENCE = 0.95
_NORMAL = 1.959964  # the quantile of CONFIDENCE
PRODUCT = "*"  # a term "a*b" is the product of both logarithms


@dataclass(frozen=True)
class Interval:
    """A value and what it lies between, at CONFIDENCE."""

    value: float
    low: float
    high: float

    def as_list(self) -> list[float]:
        """Value, low, high, to six digits."""
        return [float(f"{x:.6g}") for x in (self.value, self.low, self.high)]


@dataclass(frozen=True)
class Law:
    """A fitted law. `samples` are the coefficients of its bootstrap fits, `residuals` what it leaves, by leverage."""

    terms: tuple[str, ...]
    coefficients: np.ndarray  # [1 + terms], the constant first
    samples: np.ndarray  # [NUM_SAMPLES, 1 + terms]
    residuals: np.ndarray  # [points]
    r_squared: float
    widening: float

    def value(self, point: Point) -> float:
        """What the law says of a point."""
        return float(_features([point], self.terms)[0] @ self.coefficients)

    def predict(self, point: Point) -> Interval:
        """What a measurement there is expected to find: the law is uncertain, and measurements scatter about it."""
        features = _features([point], self.terms)[0]
        scatter = np.random.default_rng(1).choice(self.residuals, len(self.samples))
        return self._interval(float(features @ self.coefficients), self.samples @ features + scatter)

    @property
    def intervals(self) -> dict[str, Interval]:
        """Each coefficient by its term; the constant's is "1"."""
        columns = zip(self.coefficients, self.samples.T, strict=True)
        return {
            term: self._interval(float(c), column)
            for term, (c, column) in zip(("1", *self.terms), columns, strict=True)
        }

    def _interval(self, value: float, samples: np.ndarray) -> Interval:
        tail = 100 * (1 - CONFIDENCE) / 2
        low, high = np.percentile(samples, [tail, 100 - tail])
        middle = float(np.median(samples))
        return Interval(
            value,
            min(value, middle - self.widening * (middle - float(low))),
            max(value, middle + self.widening * (float(high) - middle)),
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data: coefficients with their intervals, R^2, and of how many points."""
        return {
            "coefficients": {term: interval.as_list() for term, interval in self.intervals.items()},
            "r_squared": round(self.r_squared, 4),
            "points": len(self.residuals),
        }


def least_points(terms: Sequence[str]) -> int:
    """How many points a law of these terms needs: one more than it has coefficients."""
    return 2 + len(terms)


def fit(
    points: Sequence[Point],
    values: Sequence[float],
    terms: Sequence[str],
    replicates: np.ndarray | None = None,
    seed: int = 0,
) -> Law:
    """The law of these terms through values at points, whose variables are above 0.

    `replicates` [any number, points] are the values of resampled measurements.

    Raises:
        ValueError: too few points, or points that leave a coefficient open.
    """
    if len(points) < least_points(terms):
        raise ValueError(
            f"{len(points)} points for a law of {', '.join(terms)}; allowed: {least_points(terms)} or more"
        )
    features, y = _features(points, terms), np.asarray(values, float)
    if np.linalg.matrix_rank(features) < features.shape[1]:
        raise ValueError(f"the points do not tell {', '.join(terms)} apart; allowed: points that differ in each")
    solve = np.linalg.pinv(features)  # [1 + terms, points]
    coefficients = solve @ y
    leverage = np.einsum("ij,ji->i", features, solve)
    left = y - features @ coefficients
    residuals = left / np.sqrt(np.maximum(1 - leverage, 1e-3))
    residuals -= residuals.mean()
    total = float(((y - y.mean()) ** 2).sum())
    varies = total > 1e-24 * float((y**2).sum())  # by more than rounding: else there is nothing to explain
    r_squared = 1 - float((left**2).sum()) / total if varies else 1.0
    rng = np.random.default_rng(seed)
    measured = y[None] if replicates is None else replicates
    fitted = (measured @ solve.T @ features.T)[rng.integers(len(measured), size=NUM_SAMPLES)]
    samples = (fitted + rng.choice(residuals, (NUM_SAMPLES, len(y)))) @ solve.T
    widening = student_quantile(len(y) - features.shape[1]) / _NORMAL
    return Law(tuple(terms), coefficients, samples, residuals, r_squared, widening)


def student_quantile(freedom: int) -> float:
    """Of Student's distribution with so many degrees of freedom, the quantile whose CONFIDENCE lies within +-."""
    # With t = sqrt(freedom) tan(angle) the density is that of cos(angle)^(freedom - 1).
    angles = np.linspace(0.0, math.pi / 2, 20_001)
    density = np.cos(angles) ** (freedom - 1)
    mass = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(freedom) * math.tan(float(np.interp(CONFIDENCE, mass / mass[-1], angles)))


def _features(points: Sequence[Point], terms: Sequence[str]) -> np.ndarray:
    """[points, 1 + terms]: 1, and the logarithms."""
    rows = [
        [1.0, *(math.prod(math.log2(point[name]) for name in term.split(PRODUCT)) for term in terms)]
        for point in points
    ]
    return np.array(rows)
