"""Which versions of vLLM the worker runs under: said here and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Mapping

TESTED = "0.32.0"
# Minor versions whose worker interface is the one that is implemented here: before 0.32 a step did not say how many
# drafts its grammars have seen, and before 0.31 requests were not checked for the second model runner.
OLDEST, NEWEST = (0, 32), (0, 33)
OVERRIDE = "SPECPAGED_VLLM_ANY_VERSION"


def check_version(version: str, environment: Mapping[str, str] = os.environ) -> None:
    """Raises RuntimeError for a version of vLLM that is not supported, unless OVERRIDE is set to 1."""
    if environment.get(OVERRIDE) == "1":
        return
    numbers = version.split("+")[0].split(".")[:2]
    if all(part.isdecimal() for part in numbers) and OLDEST <= tuple(map(int, numbers)) <= NEWEST:
        return
    oldest, newest = (".".join(map(str, bound)) for bound in (OLDEST, NEWEST))
    raise RuntimeError(
        f"specpaged's worker supports vLLM {oldest} to {newest} (tested with {TESTED}), and this is {version}; install "
        f"a supported version, or set {OVERRIDE}=1 to try this one"
    )
