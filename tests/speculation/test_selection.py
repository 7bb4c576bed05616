"""Selection: the best set of drafts that there is, found by sorting."""

from __future__ import annotations

import math
from itertools import product

import hypothesis.strategies as st
import pytest
from hypothesis import given

from specpaged.speculation.acceptance import logit
from specpaged.speculation.controller import Candidate
from specpaged.speculation.selection import select
from specpaged.speculation.tetris import TetrisController, tetris


@st.composite
def chances_of_a_batch(draw, most_sequences=4, most_drafts=4):
    """Chances that never rise along a sequence, with ties within and between sequences."""
    chances = []
    for _ in range(draw(st.integers(1, most_sequences))):
        chance, of_sequence = 1.0, []
        for conditional in draw(st.lists(st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]), max_size=most_drafts)):
            chance *= conditional
            of_sequence.append(chance)
        chances.append(of_sequence)
    return chances


def rate_of(chances, counts, verify_seconds):
    tokens = len(chances) + sum(sum(of[:count]) for of, count in zip(chances, counts, strict=True))
    return tokens / verify_seconds[sum(counts)]


@given(chances=chances_of_a_batch(), steps=st.lists(st.sampled_from([0.0, 0.1, 1.0, 3.0]), min_size=17, max_size=17))
def test_no_other_set_brings_more_tokens_a_second(chances, steps):
    verify_seconds = [5.0 + sum(steps[:n]) for n in range(17)]
    chosen, rate = select(chances, verify_seconds)
    assert all(0 <= count <= len(of) for count, of in zip(chosen, chances, strict=True))
    everything = product(*(range(len(of) + 1) for of in chances))
    best = max(rate_of(chances, counts, verify_seconds) for counts in everything)
    assert rate == pytest.approx(rate_of(chances, chosen, verify_seconds), rel=1e-12)
    assert rate == pytest.approx(best, rel=1e-12)


@given(
    chances=chances_of_a_batch(), steps=st.lists(st.sampled_from([0.0, 0.1, 1.0, 3.0]), min_size=17, max_size=17),
    a_pass=st.sampled_from([0.0, 0.4, 2.0]), row=st.sampled_from([0.0, 0.2]), proposal=st.sampled_from([0.0, 1.0]),
    plain=st.sampled_from([None, 4.0]), overlaps=st.booleans(),
)  # fmt: skip
def test_no_other_set_of_drafts_that_are_still_to_be_made_brings_more_tokens_a_second(
    chances, steps, a_pass, row, proposal, plain, overlaps
):
    verify = [5.0 + sum(steps[:n]) for n in range(17)]

    def rate_with(counts):
        tokens = len(chances) + sum(sum(of[:count]) for of, count in zip(chances, counts, strict=True))
        if plain is not None and not any(counts):
            return tokens / plain
        drafting = proposal + a_pass * max(counts) + row * sum(counts)
        at_once = overlaps and any(counts)
        return tokens / (max(verify[sum(counts)], drafting) if at_once else verify[sum(counts)] + drafting)

    draft_seconds = [[0.0] + [a_pass + row * n for n in range(1, 5)]]
    times = {"proposal_seconds": proposal, "plain_seconds": plain, "overlaps": overlaps}
    chosen, rate = select(chances, verify, draft_seconds, **times)
    best = max(map(rate_with, product(*(range(len(of) + 1) for of in chances))))
    assert rate == pytest.approx(rate_with(chosen), rel=1e-12)
    assert rate == pytest.approx(best, rel=1e-12)


def test_the_worked_example_of_select():
    chances = [[0.9, 0.5], [0.6], []]
    assert select(chances, [(10 + n) / 1000 for n in range(4)]) == ([2, 1, 0], pytest.approx(5 / 0.013))


def test_of_equals_the_fewest_and_the_shortest_are_taken():
    assert select([[1.0, 1.0], [1.0, 1.0]], [2.0, 3.0, 4.0, 5.0, 6.0]).counts == [0, 0]  # each is worth just its time
    assert tetris([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], 3) == [2, 1]
    assert tetris([[0.5], []], 4) == [1, 0]
    assert tetris([[0.5]], -1) == [0]


@given(chances=chances_of_a_batch(), capacity=st.integers(0, 20))
def test_tetris_takes_as_many_as_it_may_and_none_that_is_less_likely_than_one_it_leaves(chances, capacity):
    counts = tetris(chances, capacity)
    assert sum(counts) == min(capacity, sum(map(len, chances)))
    taken = [chance for of, count in zip(chances, counts, strict=True) for chance in of[:count]]
    left = [chance for of, count in zip(chances, counts, strict=True) for chance in of[count:]]
    assert not taken or not left or min(taken) >= max(left)


@given(
    chance=st.floats(0.05, 0.99), num_sequences=st.integers(1, 5), first=st.floats(0.01, 2.0),
    each=st.floats(0.0, 0.2), row=st.floats(0.0, 0.3),
)  # fmt: skip
def test_sequences_alike_are_drafted_for_as_deep_as_the_best_depth_that_is_tried_by_itself(
    chance, num_sequences, first, each, row
):
    chances = [[chance ** (j + 1) for j in range(6)]] * num_sequences

    def seconds(depth):
        return 3.0 + row * depth * num_sequences + depth * (first + each * num_sequences)

    verify_seconds = [3.0 + row * n for n in range(6 * num_sequences + 1)]
    draft_seconds = [0.0] + [first + each * n for n in range(1, num_sequences + 1)]
    chosen = select(chances, verify_seconds, [draft_seconds]).counts
    tokens = num_sequences + sum(sum(of[:count]) for of, count in zip(chances, chosen, strict=True))
    width = [sum(count > depth for count in chosen) for depth in range(6)]
    taken = 3.0 + row * sum(chosen) + sum(first + each * n for n in width if n)
    best = max(num_sequences * (1 + sum(chances[0][:depth])) / seconds(depth) for depth in range(7))
    assert tokens / taken >= best * (1 - 1e-9)


def test_the_tetris_controller_drafts_more_than_it_verifies_and_takes_the_likeliest():
    controller = TetrisController(num_drafts=2, num_extra=1)
    plan = controller.plan([Candidate("a", 8), Candidate("b", 2), Candidate("c", 0)])
    assert plan.num_draft_tokens == [3, 2, 0]
    evidence = [[logit(p) for p in of_draft] for of_draft in ([0.9, 0.9, 0.9], [0.6, 0.95], [])]
    assert controller.select("abc", evidence) == [3, 2, 0]
    assert controller.select("ab", evidence[:2]) == [3, 1]  # .9 .81 .73 | .6 .57
    assert controller.select("ab", [[math.nan, 3.0, 3.0], [0.0, 0.0]]) == [2, 2]  # ties: the shorter, then the first
