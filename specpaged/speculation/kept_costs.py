"""What is known of costs before anything was run: whose those on disk are, and what is guessed of a step's rest."""

from __future__ import annotations

from collections.abc import Iterable

VERSION = 38  # of what is kept: nothing of another one is taken
# Besides the passes, until it has been seen: of a step and each of its sequences, of a proposal and each of those.
FIRST_GUESS = {
    "seconds_per_step": 7e-5,
    "seconds_per_sequence": 2.3e-5,
    "seconds_per_proposal": 7e-5,
    "seconds_per_drafting": 4e-5,
}


def whose(device: str, models: Iterable[tuple[str, int, str]]) -> dict[str, object]:
    """By what costs are found again by who has no models: of a device such as "cpu" or "cuda:0", the architecture of
    each model, the number of its parameters, and the dtype of its arithmetic.
    """
    names = [" ".join(map(str, model)) for model in models]
    return {"version": VERSION, "device": device.partition(":")[0], "models": names}
