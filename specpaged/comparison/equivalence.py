"""Are two decodings of the same prompts the same? If not: where do they part, and was it a tie?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FP32_TIE = 1e-4
BF16_STEPS = 2
BF16_MANTISSA_BITS = 7


@dataclass(frozen=True)
class TopTwo:
    """The two most likely tokens of a position, and their logits."""

    token_ids: tuple[int, int]
    logits: tuple[float, float]

    @property
    def margin(self) -> float:
        """How far the first logit is above the second."""
        return self.logits[0] - self.logits[1]


@dataclass(frozen=True)
class Mismatch:
    """Two outputs of one prompt that part at `position` (0 = first generated token)."""

    prompt_idx: int
    position: int
    token_ids: tuple[int | None, int | None]  # the reference's and ours; None: that output had ended
    margin: float | None = None
    label: str = "fault"


def first_divergence(reference: Sequence[int], output: Sequence[int]) -> int | None:
    """The first position at which the outputs differ (one may end early); None if they are the same."""
    for position, (a, b) in enumerate(zip(reference, output, strict=False)):
        if a != b:
            return position
    return None if len(reference) == len(output) else min(len(reference), len(output))


def compare(references: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> list[Mismatch]:
    """Every prompt whose two outputs differ."""
    mismatches = []
    for i, (reference, output) in enumerate(zip(references, outputs, strict=True)):
        position = first_divergence(reference, output)
        if position is not None:
            pair = tuple(ids[position] if position < len(ids) else None for ids in (reference, output))
            mismatches.append(Mismatch(i, position, pair))
    return mismatches


def tie_tolerance(dtype: str, logit: float) -> float:
    """The largest difference of two logits that counts as a tie: 1e-4 in fp32, two steps of that size in bf16."""
    if dtype == "float32":
        return FP32_TIE
    if not math.isfinite(logit):
        return 0.0
    exponent = math.floor(math.log2(max(abs(logit), 2.0**-126)))
    return BF16_STEPS * 2.0 ** (exponent - BF16_MANTISSA_BITS)


def is_near_tie(mismatch: Mismatch, reference: TopTwo, ours: TopTwo, dtype: str) -> bool:
    """Whether the two tokens are the position's top two in both models' eyes, and as good as equal in both."""
    pair = set(mismatch.token_ids)
    return all(
        set(top.token_ids) == pair and abs(top.margin) <= tie_tolerance(dtype, reference.logits[0])
        for top in (reference, ours)
    )
