"""A draft model: its first pass, in chunks of the token budget, and the distributions that it hands on."""

from __future__ import annotations

import torch

from specpaged import SamplingParams
from specpaged.drafting.base import DraftRow
from specpaged.drafting.draft_model import DraftModelDrafter
from specpaged.modeling.ragged_batch import RaggedRow
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
