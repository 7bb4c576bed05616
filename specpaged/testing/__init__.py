"""What tests and benchmarks of others need: pairs of any size that need no download, and the contract of a drafter."""

from specpaged.testing.drafter_contract import DrafterReport, check_drafter
from specpaged.testing.drafter_witness import ContractError
from specpaged.testing.synthetic import SHAPES, SyntheticPair, synthetic_pair

__all__ = ["SHAPES", "ContractError", "DrafterReport", "SyntheticPair", "check_drafter", "synthetic_pair"]
