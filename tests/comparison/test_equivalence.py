"""Where two decodings part, and when parting is a tie: the judge that `specpaged verify` relies on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specpaged.comparison import reference as references
from specpaged.comparison.equivalence import Mismatch, TopTwo, compare, first_divergence, is_near_tie, tie_tolerance

IDS = st.lists(st.integers(0, 3), max_size=12)


def top(a, b, first=5.0, margin=0.0):
    return TopTwo((a, b), (first, first - margin))


@given(IDS, IDS)
def test_the_first_divergence_is_where_the_common_prefix_ends(a, b):
    position = first_divergence(a, b)
    assert position == first_divergence(b, a)
    if position is None:
        assert a == b
    else:
        assert a[:position] == b[:position]
        assert a[position : position + 1] != b[position : position + 1]


@given(IDS, st.data())
def test_a_single_changed_token_is_found_at_its_place(ids, data):
    if ids:
        position = data.draw(st.integers(0, len(ids) - 1))
        changed = [*ids[:position], ids[position] + 1, *ids[position + 1 :]]
        assert first_divergence(ids, changed) == position
        assert first_divergence(ids, ids[:position]) == position  # an early end is a divergence, too


def test_compare_lists_each_prompt_that_differs_and_none_else():
    found = compare([[1, 2], [1, 2], [1, 2], [], [4]], [[1, 2], [1, 3], [1], [], [4, 5]])
    assert found == [Mismatch(1, 1, (2, 3)), Mismatch(2, 1, (2, None)), Mismatch(4, 1, (None, 5))]
    assert {mismatch.label for mismatch in found} == {"fault"}
    with pytest.raises(ValueError, match="zip"):
        compare([[1]], [])


def test_the_fp32_tolerance_is_absolute():
    assert {tie_tolerance("float32", logit) for logit in (0.0, -3.0, 1e4)} == {1e-4}


@given(st.floats(1e-3, 1e4), st.booleans())
def test_the_bf16_tolerance_is_two_steps_of_the_logits_size(size, negative):
    logit = torch.tensor(-size if negative else size, dtype=torch.bfloat16)
    magnitude = logit.abs()
    step = torch.nextafter(magnitude, torch.tensor(torch.inf, dtype=torch.bfloat16)) - magnitude
    assert tie_tolerance("bfloat16", logit.item()) == 2 * step.item()


@pytest.mark.parametrize("logit", [0.0, 1e-45, float("nan"), float("inf"), float("-inf")])
def test_no_logit_is_too_odd_for_the_tolerance(logit):
    assert 0 <= tie_tolerance("bfloat16", logit) < 1e-38


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 2 * 2.0**-5)])  # 5.0: steps of 2^-5
def test_a_near_tie_is_within_the_tolerance_in_both_models(dtype, tolerance):
    mismatch = Mismatch(0, 3, (8, 9))
    inside, outside = 0.99 * tolerance, 1.01 * tolerance
    assert is_near_tie(mismatch, top(8, 9, margin=inside), top(9, 8, margin=inside), dtype)
    assert is_near_tie(mismatch, top(8, 9, margin=0.0), top(8, 9, margin=inside), dtype)
    assert not is_near_tie(mismatch, top(8, 9, margin=outside), top(9, 8, margin=inside), dtype)
    assert not is_near_tie(mismatch, top(8, 9, margin=inside), top(9, 8, margin=outside), dtype)
    assert not is_near_tie(mismatch, top(8, 9, margin=float("nan")), top(9, 8), dtype)


def test_a_near_tie_is_between_the_top_two_of_both_models():
    mismatch = Mismatch(0, 3, (8, 9))
    assert not is_near_tie(mismatch, top(8, 7), top(9, 8), "float32")
    assert not is_near_tie(mismatch, top(8, 9), top(9, 7), "float32")
    assert not is_near_tie(Mismatch(0, 3, (8, None)), top(8, 9), top(9, 8), "float32")


class FakeTransformers:
    """Knows every top two; stands in for the reference model."""

    model = SimpleNamespace(dtype=torch.float32)

    def __init__(self, llm):
        self.seen = llm.seen

    def top_two(self, token_ids):
        self.seen.append(list(token_ids))
        return top(1, 2, margin=5e-5) if token_ids[0] < 10 else top(1, 2, margin=0.5)


def test_the_judge_tells_near_ties_from_faults_at_the_place_where_outputs_part(monkeypatch):
    llm = SimpleNamespace(seen=[])
    monkeypatch.setattr(references, "_our_top_two", lambda _llm, ids: top(2, 1, margin=0.0))
    job = SimpleNamespace(llm=llm, token_ids=[[5, 5], [50], [6], [7]])
    runs = [
        SimpleNamespace(token_ids=[[3, 1, 4], [1], [8, 1], [9]]),
        SimpleNamespace(token_ids=[[3, 2, 0], [2], [8], [9]]),
    ]
    monkeypatch.setattr(references, "transformers_reference", lambda llm: lambda: FakeTransformers(llm))
    judged = references.judge("hf", job, runs)
    assert [(m.prompt_idx, m.position, m.label) for m in judged] == [
        (0, 1, "near-tie"),
        (1, 0, "fault"),
        (2, 1, "fault"),
    ]
    assert [m.margin for m in judged] == [pytest.approx(5e-5), pytest.approx(0.5), None]
    assert llm.seen == [[5, 5, 3], [50]]  # the prompt and what both had said
    assert {m.label for m in references.judge("plain", job, runs)} == {"fault"}  # own decoding: no ties


def test_references_are_refused_by_name():
    with pytest.raises(ValueError, match="--reference='vllm' is not known; allowed: plain, hf"):
        references.check_reference("vllm", 0.0)
    with pytest.raises(ValueError, match=r"--temperature=0.8 .*allowed: --temperature 0, or --reference plain"):
        references.check_reference("hf", 0.8)
    references.check_reference("plain", 0.8)
    references.check_reference("hf", 0.0)
