"""Which drafts stand, and the token that follows them."""

from __future__ import annotations

from specpaged.verification.base import Verifier
from specpaged.verification.coupled import CoupledVerifier
from specpaged.verification.rejection import RejectionVerifier


def get_verifier(name: str, backend: str = "torch") -> Verifier:
    """The verifier of that name, by the kernels where the target's backend is "triton".

    Raises:
        ValueError: naming the verifiers that there are.
    """
    if name not in ("greedy", "coupled", "rejection"):
        raise ValueError(f"verification={name!r} is unknown; allowed: 'greedy', 'coupled', 'rejection'")
    if backend == "triton":  # kernels are not imported before they are wanted: that takes a second
        from specpaged.verification.device import KernelCoupledVerifier, KernelRejectionVerifier

        return KernelRejectionVerifier() if name == "rejection" else KernelCoupledVerifier(name)
    return RejectionVerifier() if name == "rejection" else CoupledVerifier(name)
