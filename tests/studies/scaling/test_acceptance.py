"""One pass over the target's outputs counts what rounds would bring that are drafted token by token."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from specpaged import LLM
from specpaged.studies.scaling.acceptance import Outputs, count
from specpaged.studies.scaling.counts import Counts
from specpaged.studies.scaling.drafts import DraftPoint
from tests import toys

MAX_TOKENS = 24


@pytest.fixture(scope="module")
def outputs(tokenizer_pair):
    llm = LLM(tokenizer_pair.target, max_num_seqs=4, max_model_len=96)
    prompts = [prompt["prompt_token_ids"] for prompt in toys.prompts(6)]
    return Outputs.write(llm, prompts, MAX_TOKENS)


@torch.no_grad()
def rounds_by_hand(draft, tokens, length, k):
    """(accepted, rounds): the draft proposes k tokens, one after the other; the target says which stand."""
    accepted = rounds = 0
    known = length + 1
    while known + k <= len(tokens):
        proposed = list(tokens[:known])
        for _ in range(k):
            proposed.append(int(draft(input_ids=torch.tensor([proposed])).logits[0, -1].argmax()))
        run = 0
        while run < k and proposed[known + run] == tokens[known + run]:
            run += 1
        accepted, rounds, known = accepted + run, rounds + 1, known + run + 1
    return accepted, rounds


@pytest.mark.parametrize("k", [1, 3])
def test_counts_are_those_of_drafting_token_by_token(tokenizer_pair, outputs, k):
    point = DraftPoint.read(tokenizer_pair.draft, tokenizer_pair.target)
    counts = count(point, outputs)
    draft = AutoModelForCausalLM.from_pretrained(tokenizer_pair.draft, dtype=torch.float32).eval()
    by_hand = [
        rounds_by_hand(draft, tokens, length, k)
        for tokens, length in zip(outputs.sequences, outputs.prompt_lengths, strict=True)
    ]
    assert counts.accepted[k - 1].tolist() == [accepted for accepted, _ in by_hand]
    assert counts.rounds[k - 1].tolist() == [rounds for _, rounds in by_hand]
    assert 0 < sum(accepted for accepted, _ in by_hand) < k * sum(rounds for _, rounds in by_hand)


def test_a_draft_that_is_the_target_is_always_right(tokenizer_pair, outputs):
    counts = count(DraftPoint.read(tokenizer_pair.target, tokenizer_pair.target), outputs)
    assert [counts.tokens(k) for k in (1, 5)] == [2, 6]


def test_replicates_draw_the_same_outputs_for_every_draft_and_scatter_about_what_was_counted():
    rng = np.random.default_rng(0)
    draft = DraftPoint("a", "", 10, None)
    rounds = rng.integers(5, 9, (8, 40))
    accepted = rng.integers(0, 12, (8, 40))
    first, second = Counts(draft, rounds, accepted), Counts(draft, rounds, accepted + 1)
    assert first.replicates(3).mean() == pytest.approx(first.tokens(3), rel=0.02)
    assert first.replicates(3).std() > 0.01
    assert (second.replicates(3) - first.replicates(3)).std() < 0.1 * first.replicates(3).std()
    again = Counts.of_dict(draft, first.as_dict())
    assert again.tokens(3) == first.tokens(3)
