"""Which drafts stand, and the token that follows them."""

from __future__ import annotations

from specpaged.verification.base import Verifier
from specpaged.verification.coupled import CoupledVerifier
from specpaged.verification.rejection import RejectionVerifier


def get_verifier(name: str) -> Verifier:
    """The verifier of that name.

    Raises:
        ValueError: naming the verifiers that there are.
    """
    if name in ("greedy", "coupled"):
        return CoupledVerifier(name)
    if name == "rejection":
        return RejectionVerifier()
    raise ValueError(f"verification={name!r} is unknown; allowed: 'greedy', 'coupled', 'rejection'")
