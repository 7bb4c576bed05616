"""A draft model: its first pass, in chunks of the token budget, and the distributions that it hands on."""

from __future__ import annotations

import pytest
import torch

from specpaged import SamplingParams
from specpaged.drafting.base import DraftRow
from specpaged.drafting.draft_model import MOST_ROWS, DraftModelDrafter
from specpaged.modeling.ragged_batch import RaggedRow
from specpaged.sampling import get_sampling_batch
from specpaged.sampling.request import SamplingRequest
from specpaged.speculation.stop_rule import StopRule
from tests import toys
from tests.engine.test_engine import make_llm


def test_no_pass_runs_more_than_the_token_budget_and_only_the_end_of_who_drafts_has_logits():
    a = DraftRow(None, [1, 2, 3, 4, 5, 6], 10, [7, 8], 3, 0)
    b = DraftRow(None, [9, 9], 0, [3], 0, 0)  # catches up
    c = DraftRow(None, [4, 5, 6], 2, [2], 1, 1)
    assert DraftModelDrafter(None, 100, 4, with_probs=False)._chunks([a, b, c]) == [
        [RaggedRow([1, 2, 3, 4], 10, [7, 8], 0)],
        [RaggedRow([5, 6], 14, [7, 8], 1), RaggedRow([9, 9], 0, [3], 0)],
        [RaggedRow([4, 5, 6], 2, [2], 1)],
    ]


def test_a_pass_of_a_draft_is_bounded_whatever_the_targets_may_have():
    assert DraftModelDrafter(None, 100, 4 * MOST_ROWS, with_probs=False).max_num_batched_tokens == MOST_ROWS
    assert DraftModelDrafter(None, 100, 7, with_probs=False).max_num_batched_tokens == 7


@pytest.mark.parametrize("with_rule", [False, True])
@pytest.mark.parametrize("budget", [3, 7, 12, 20])
def test_drafts_and_looks_are_the_same_in_however_many_passes(toy_pair, budget, with_rule):
    """Two draft, of which one has a prompt unseen; one looks back, one catches up. Rules end drafts as in one pass."""
    llm = make_llm(toy_pair, k=3)
    runner, prompt = llm.engine.draft, toys.prompts(1, shortest=9, longest=9)[0]["prompt_token_ids"]
    rows = [
        DraftRow(None, prompt, 0, [1, 2], 3, 0),
        DraftRow(None, [5], 0, [3, 4], 2, 1),
        DraftRow(None, [7, 3, 9, 4], 0, [5], 0, 2, num_looked_back=3),
        DraftRow(None, [8, 8], 0, [6], 0, 0),
    ]
    requests = [SamplingRequest(SamplingParams(temperature=0.0), i, [0], []) for i in range(3)]
    sampling = get_sampling_batch("torch")(requests, toys.VOCAB_SIZE, "cpu")
    rule = StopRule(1.0, [0.0] * 8, [-1.0, 0.5], [0.0, 0.0], 0.2, 0.0) if with_rule else None
    drafts = {}
    for most in (100, budget):
        for layer in runner.kv_cache.layers:
            layer.zero_()
        drafter = DraftModelDrafter(runner, toys.VOCAB_SIZE, most, with_probs=False)
        assert (len(drafter._chunks(rows)) > 1) == (most < 16)
        drafts[most] = drafter.propose(rows, sampling, rule), [layer.clone() for layer in runner.kv_cache.layers]
    found, expected = drafts[budget], drafts[100]
    assert [draft.token_ids for draft in found[0]] == [draft.token_ids for draft in expected[0]]
    assert (len(expected[0][0]) < 3) == with_rule
    for ours, theirs in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(ours, theirs)


def test_distributions_are_those_that_the_drafts_were_drawn_from(toy_pair):
    """Processed as the request asks for, as rejection sampling is unbiased with no others."""
    llm = make_llm(toy_pair, k=3, speculative={"verification": "rejection"})
    params = SamplingParams(temperature=0.8, top_k=4, seed=1, max_tokens=20, ignore_eos=True)
    for i, prompt in enumerate(toys.prompts(3)):
        llm.engine.add_request(str(i), prompt["prompt_token_ids"], params)
    num_drafts = 0
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
        for sequence in llm.engine.scheduler.running:
            draft = sequence.draft
            if not draft:
                continue
            num_drafts += 1
            assert draft.probs.shape == (len(draft), toys.VOCAB_SIZE)
            torch.testing.assert_close(draft.probs.sum(dim=-1), torch.ones(len(draft)))
            assert ((draft.probs > 0).sum(dim=-1) <= 4).all()
            of_tokens = draft.probs.gather(1, torch.tensor(draft.token_ids).unsqueeze(-1)).squeeze(-1)
            torch.testing.assert_close(of_tokens.log(), torch.tensor(draft.logprobs))
    assert num_drafts > 10
