"""A draft that is cut loses its end in every respect."""

from __future__ import annotations

import torch

from specpaged.drafting.draft import NO_DRAFT, Draft


def test_tokens_log_probabilities_and_distributions_are_cut_alike():
    draft = Draft([5, 6, 7], [-1.0, -2.0, -3.0], torch.arange(6.0).view(3, 2))
    cut = draft.cut(2)
    assert (list(cut.token_ids), list(cut.logprobs)) == ([5, 6], [-1.0, -2.0])
    assert torch.equal(cut.probs, draft.probs[:2])
    assert draft.cut(3) is draft.cut(4) is draft
    assert draft.cut(0) is draft.cut(-1) is NO_DRAFT
    assert Draft([5, 6]).cut(1) == Draft([5])
