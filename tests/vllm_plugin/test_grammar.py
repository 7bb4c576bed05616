"""A grammar rules over every row that is verified."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

import numpy as np
from vllm.v1.core.sched.output import GrammarOutput

from specpaged.sampling.request import SamplingRequest
from specpaged.sampling_params import SamplingParams
from specpaged.vllm_plugin.grammar import apply_grammar, unpacked

V = 40


def packed(allowed):
    """[rows][V] bool -> [rows, 2] int32, bit j % 32 of word j // 32."""
    words = np.zeros((len(allowed), 2), np.int32)
    for r, row in enumerate(allowed):
        for j in row:
            words[r, j // 32] |= np.uint32(1 << (j % 32)).astype(np.int32)
    return words


def test_a_bitmask_is_unpacked_bit_by_bit():
    rows = [[0, 31, 32, 39], [], list(range(V))]
    mask = unpacked(torch.from_numpy(packed(rows)), V)
    assert [row.nonzero().flatten().tolist() for row in mask] == rows


def requests(count):
    return [SamplingRequest(SamplingParams(temperature=0), i, [0], []) for i in range(count)]


def allowed_by(request):
    return [row.nonzero().flatten().tolist() for row in request.token_mask]


def test_the_worked_example_of_the_docstring():
    logits = torch.arange(4.0 * V).view(4, V)  # A0 A1 A2 B0
    grammar = GrammarOutput(["A"], packed([[3, 5], [6], list(range(V))]), [1])
    kept, drafts, (a, b) = apply_grammar(logits, [[5, 6], []], requests(2), {"A": 0, "B": 1}, {"A": 2}, 5, grammar)
    assert drafts == [[5], []]
    assert torch.equal(kept, logits[[0, 1, 3]])
    assert allowed_by(a) == [[3, 5], [6]]
    assert b.token_mask is None


def test_rows_of_padding_and_of_requests_that_do_not_sample_are_passed_over():
    logits = torch.zeros(2, V)  # of B, who has no drafts, and of C, who has no grammar
    grammar = GrammarOutput(["A", "B"], packed([[1], [1], [2], [9], [9]]), [0, 0])
    # vLLM scheduled a draft's row for A, which is in its prefill, and padding for B.
    kept, drafts, (b, c) = apply_grammar(logits, [[], []], requests(2), {"B": 0, "C": 1}, {"A": 1, "B": 2}, 5, grammar)
    assert drafts == [[], []]
    assert torch.equal(kept, logits)
    assert allowed_by(b) == [[2]]
    assert c.token_mask is None


def test_rows_may_come_in_strides_of_the_longest_draft():
    logits = torch.zeros(3, V)  # B0 B1, C0; A does not sample
    rows = [[1], [], [], [2], [3], [], [4], [], []]
    grammar = GrammarOutput(["A", "B", "C"], packed(rows), [0, 1, 0])
    places, scheduled = {"B": 0, "C": 1}, {"B": 1}
    kept, drafts, (b, c) = apply_grammar(logits, [[7], []], requests(2), places, scheduled, 3, grammar)
    assert drafts == [[7], []]
    assert torch.equal(kept, logits)
    assert allowed_by(b) == [[2], [3]]
    assert allowed_by(c) == [[4]]


def test_drafts_that_no_grammar_has_seen_are_dropped():
    grammar = GrammarOutput(["A"], packed([[1], [2], [3]]), None)
    kept, drafts, (a,) = apply_grammar(torch.zeros(3, V), [[1, 2]], requests(1), {"A": 0}, {"A": 2}, 5, grammar)
    assert drafts == [[]]
    assert len(kept) == 1
    assert allowed_by(a) == [[1]]
