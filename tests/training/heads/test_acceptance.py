"""Counts of accepted drafts, on hand-made text and against one chain at a time."""

from __future__ import annotations

import torch

from specpaged.training.heads.acceptance import NUM_DRAFTS, Acceptance, measure_heads, measure_prompt_lookup, propose
from specpaged.training.heads.batches import Batch
from specpaged.training.heads.continuations import Continuation
from tests.training.heads.conftest import random_text


def test_figures_of_a_worked_example():
    acceptance = Acceptance(starts=8, accepted=(4, 3, 0, 0, 0))
    assert acceptance.by_position == [0.5, 0.375, 0.0, 0.0, 0.0]
    assert acceptance.given_those_before == [0.5, 0.75, 0.0, 0.0, 0.0]
    assert acceptance.mean_length == 1 + 7 / 8


def test_prompt_lookup_finds_what_repeats_and_nothing_else():
    repeating, new = list(range(20, 32)), list(range(100, 112))
    # Starts at the last token of the prompt and behind: of 12 tokens, those with 5 more behind the one that was read.
    acceptance, _ = measure_prompt_lookup([Continuation([*repeating, 9], repeating)])
    assert acceptance.starts == 7
    assert acceptance.accepted == (7,) * 5
    acceptance, _ = measure_prompt_lookup([Continuation([*repeating, 9], new)])
    assert (acceptance.starts, acceptance.accepted) == (7, (0,) * 5)


@torch.no_grad()
def test_proposals_read_the_proposals_before_them(frozen, heads):
    """Each start drafts for itself: the text behind it changes nothing, and a draft follows from those before it."""
    (text,) = random_text([(6, 14)])
    batch = Batch.of([text], heads, frozen)
    proposed = propose(heads, frozen, batch, NUM_DRAFTS)[0]
    for row in (0, 4, 9):
        tokens = text.all_token_ids[: row + 2]
        drafts = []
        for step in range(NUM_DRAFTS):
            # The features of what is known; tokens are the drafts so far, as if they were text.
            padded = [*tokens, *drafts, *[0] * (NUM_DRAFTS + 2)]
            alone = Batch.of([Continuation(padded, [])], heads, frozen)
            unrolled = heads.unroll(alone.hidden, lambda s, alone=alone: frozen.embed(alone.shifted(1 + s)), step + 1)
            states = list(unrolled)[step]
            drafts.append(int(heads.token_ids(heads.logits(states[0, row], frozen))))
        assert proposed[row].tolist() == drafts


def test_heads_are_counted_where_their_proposals_are_the_text(frozen, heads):
    texts = random_text([(6, 14), (3, 11), (4, 3)])
    proposed = propose(heads, frozen, Batch.of(texts, heads, frozen), NUM_DRAFTS)
    row = 7
    planted = texts[0].all_token_ids
    planted = [*planted[: row + 2], *proposed[0, row, :3].tolist(), *planted[row + 5 :]]
    texts[0] = Continuation(planted[:6], planted[6:])
    acceptance = measure_heads(heads, frozen, texts, 2)
    assert acceptance.starts == 9 + 6  # none of a continuation that ends before a whole draft
    assert all(count >= 1 for count in acceptance.accepted[:3])
