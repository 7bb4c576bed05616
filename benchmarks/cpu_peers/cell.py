"""Rounds of all contenders at one B, and what is read off them. Ratios are taken within a round, then their median."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Protocol

from benchmarks.cpu_peers.ways import OURS

SPECULATIVE = " speculative"  # behind the name of a way that has a draft


class Decodes(Protocol):
    """A contender."""

    name: str

    def decode(
        self, prompts: Sequence[Sequence[int]], batch_size: int, output_len: int
    ) -> tuple[list[list[int]], float]:
        """Outputs, and seconds."""


def play(
    contenders: Sequence[Decodes],
    rounds: Sequence[Sequence[Sequence[int]]],
    batch_size: int,
    output_len: int,
) -> dict[str, Any]:
    """Every contender decodes every round's prompts once, in an order that rotates, behind a batch that warms up.

    Returns the summary, of speeds in tokens/s: of prompts where one token comes out.
    """
    for contender in contenders:
        contender.decode(rounds[0][:batch_size], batch_size, output_len)
    speeds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    equal = dict.fromkeys(speeds, 0)
    for i, prompts in enumerate(rounds):
        turn = i % len(contenders)
        outputs = play_round([*contenders[turn:], *contenders[:turn]], prompts, batch_size, output_len, speeds)
        for name, of_contender in outputs.items():
            equal[name] += sum(a == b for a, b in zip(of_contender, outputs[OURS], strict=True))
    num_outputs = sum(map(len, rounds))
    return summary(speeds) | {"equal_outputs": {name: f"{count}/{num_outputs}" for name, count in equal.items()}}


def play_round(
    contenders: Sequence[Decodes],
    prompts: Sequence[Sequence[int]],
    batch_size: int,
    output_len: int,
    speeds: dict[str, list[float]],
) -> dict[str, list[list[int]]]:
    """Outputs by name; what each contender's speed was is added to its speeds."""
    outputs = {}
    for contender in contenders:
        outputs[contender.name], seconds = contender.decode(prompts, batch_size, output_len)
        num_tokens = sum(map(len, prompts if output_len == 1 else outputs[contender.name]))
        speeds[contender.name].append(num_tokens / seconds)
    return outputs


def summary(speeds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Medians and spreads of the contenders' speeds, [rounds] each; over ours, plain; and ours over the best of them.

    The best is who has the highest median among those that decode plainly, and among all for ours with a draft.
    """
    medians = {name: median(of) for name, of in speeds.items()}
    beside_best = {}
    for own in (name for name in speeds if name.startswith(OURS)):
        is_plain = not own.endswith(SPECULATIVE)
        peers = [name for name in speeds if not name.startswith(OURS) and not (is_plain and name.endswith(SPECULATIVE))]
        if peers:
            best = max(peers, key=medians.__getitem__)
            beside_best[own] = {"peer": best, "ratio": _spread(_ratios(speeds[own], speeds[best]), 3)}
    return {
        "tokens_per_second": {name: _spread(of, 1) for name, of in speeds.items()},
        "over_ours": {name: round(median(_ratios(of, speeds[OURS])), 3) for name, of in speeds.items()},
        "over_the_best_peer": beside_best,
    }


def _ratios(of: Sequence[float], over: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(of, over, strict=True)]


def _spread(values: Sequence[float], digits: int) -> list[float]:
    """Median, minimum and maximum."""
    return [round(x, digits) for x in (median(values), min(values), max(values))]
