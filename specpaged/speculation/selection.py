"""Which drafts are worth their time: over a whole batch, those that make tokens per second largest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Chances = Sequence[Sequence[float]]  # [i][j]: that draft j of sequence i stands, and all before it; never rises with j


class Selection(NamedTuple):
    """How many drafts of each sequence, and what that promises."""

    counts: list[int]
    tokens_per_second: float


def select(
    chances: Chances,
    verify_seconds: Sequence[float],
    draft_seconds: Sequence[Sequence[float]] = (),
    *,
    proposal_seconds: float = 0.0,
    plain_seconds: float | None = None,
    overlaps: bool = False,
) -> Selection:
    """How many drafts of each sequence to verify, so that expected tokens / expected seconds is largest.

    Every sequence gets a token of its own in any case, and one more for each draft that stands. Of n drafts the n most
    likely ones bring most; they are the beginnings of their sequences' drafts, as chances never rise. So all n are
    tried, and the smallest of the best is taken (S. Wu et al., "TETRIS", 2502.15197, has a fixed n). With a step of
    10 + n milliseconds:

        chances     .9 .5      .6      -         sorted    .9 .6 .5
        n           0          1          2          3
        tokens      3          3.9        4.5        5.0
        a second    300        355        375        385     ->  2, 1, 0 drafts

    `verify_seconds[n]` is the step's time with n drafts in it. Where the drafts are still to be made, chances are what
    is expected of them, and `draft_seconds[j][n]` is the time of the pass that makes draft j of n sequences, 0 where n
    is; its last entry serves for all further passes. A pass takes time however few rows it has, so that the n most
    likely drafts may lie too deep: they are looked for among the first d of each sequence, too, for every d. That finds
    the best set where all passes take the same, and each row of them as much more. `proposal_seconds` is what drafts
    took, or take, besides; and `plain_seconds` is the time of a step without any, by default the one of a step whose
    drafts are all left out. Where drafting `overlaps` the verification of others, a step takes the longer of the two,
    not their sum.
    """
    order = sorted([(-chance, j, i) for i, of_sequence in enumerate(chances) for j, chance in enumerate(of_sequence)])
    deepest, last_pass = max(map(len, chances), default=0), len(draft_seconds) - 1
    plain = verify_seconds[0] + proposal_seconds if plain_seconds is None else plain_seconds
    best, best_rate = order[:0], len(chances) / plain
    last = [0] * deepest  # place in the order, by depth
    # Before the first draft of each depth: how many there are, tokens with them, what making them takes, rows by depth.
    begun = [(0, float(len(chances)), proposal_seconds, [0] * deepest)]
    for depth in range(deepest, 0, -1) if draft_seconds else (deepest,):
        are_all = depth == deepest
        num, tokens, drafting, num_rows = begun[0 if are_all else depth]
        if not are_all and max(last[:depth]) < num:
            continue  # all of these come before
        drafts = order if are_all else order[:num] + [draft for draft in order[num:] if draft[1] < depth]
        num_best = 0
        for n in range(num, len(drafts)):
            minus_chance, j, _ = drafts[n]
            if last_pass >= 0:
                if are_all:
                    if j == len(begun):
                        begun.append((n, tokens, drafting, num_rows[:]))
                    last[j] = n
                seconds, rows = draft_seconds[min(j, last_pass)], num_rows[j]
                drafting += seconds[rows + 1] - seconds[rows]
                num_rows[j] = rows + 1
            tokens -= minus_chance
            verify = verify_seconds[n + 1]
            rate = tokens / (max(verify, drafting) if overlaps else verify + drafting)
            if rate > best_rate:
                num_best, best_rate = n + 1, rate
        if num_best:
            best = drafts[:num_best]
    return Selection(_counts(len(chances), best), best_rate)


def _counts(num_sequences: int, chosen: Sequence[tuple[float, int, int]]) -> list[int]:
    counts = [0] * num_sequences
    for _, _, i in chosen:
        counts[i] += 1
    return counts
