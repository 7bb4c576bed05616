"""Methods that take turns: every one once per round, in an order that rotates."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

from specpaged.studies.method import Method
from specpaged.studies.synchronized import synchronize
from specpaged.studies.workload import Run, Workload

WARM_UP_PROMPTS = 2


def play(
    workload: Workload,
    methods: Sequence[Method],
    batch_size: int,
    num_rounds: int,
    progress: Callable[[int], object],
    arrivals: Sequence[float] | None = None,
    synchronized: bool = False,
) -> dict[Method, list[Run]]:
    """Run the methods in turn, and return the runs of each, round by round.

    Each method has an engine of its own, loaded and warmed up beforehand.

    `synchronized` engines wait for a GPU behind every stage: for shares of time, not for speed.
    """
    llms = {method: workload.make_llm(method, batch_size) for method in methods}
    if synchronized:
        for llm in llms.values():
            synchronize(llm)
    for llm in llms.values():
        workload.decode(llm, workload.prompts[: max(WARM_UP_PROMPTS, batch_size)])
    runs: dict[Method, list[Run]] = {method: [] for method in methods}
    for i in range(num_rounds):
        first = i % len(methods)
        for method in [*methods[first:], *methods[:first]]:
            gc.collect()  # one method's garbage is not collected in another one's time
            runs[method].append(workload.decode(llms[method], arrivals=arrivals, progress=progress))
    return runs


def num_identical(runs: Sequence[Run], expected: Sequence[Run]) -> int:
    """How many outputs of all rounds equal those of the same prompts and rounds in `expected`."""
    return sum(
        output == other
        for run, reference in zip(runs, expected, strict=True)
        for output, other in zip(run.token_ids, reference.token_ids, strict=True)
    )
