"""What tests and benchmarks of a serving stack need: pairs of any size that need no download."""

from specpaged.testing.synthetic import SHAPES, SyntheticPair, synthetic_pair

__all__ = ["SHAPES", "SyntheticPair", "synthetic_pair"]
