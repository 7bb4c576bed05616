"""What a pair is worth: the arithmetic on known costs, and a profile of a toy pair."""

from __future__ import annotations

import pytest

from specpaged.comparison.pair_profile import PairProfile, ProfilingController
from specpaged.speculation.controller import Candidate
from specpaged.speculation.cost_model import CostModel
from specpaged.speculation.pass_seconds import PassSeconds


def profile(draft, acceptance, share=1.0, slope=0.0, sizes=(1, 8, 64)):
    """Of a target whose pass takes 10 ms, and `slope` more for each row after the first."""
    target = PassSeconds([1, 1000], [10.0, 10.0 + 999 * slope])
    passes = None if draft is None else PassSeconds([1, 1000], [draft, draft])
    made = PairProfile(CostModel(target, passes, 0.5, 1.0), acceptance, {}, share, list(sizes), 0.0)
    for size in sizes:
        made.speedup[size] = [made.expected(size, k) for k in range(len(acceptance) + 1)]
    return made


def test_what_is_expected_is_tokens_over_time():
    pair = profile(draft=1.0, acceptance=[0.5, 0.5])
    assert pair.speedup[1][0] == 1.0
    assert pair.speedup[1][1] == pytest.approx(1.5 * 11 / (11 + 0.5 + 1))
    assert pair.speedup[1][2] == pytest.approx(1.75 * 11 / (11 + 0.5 + 2))
    assert pair.best(1) == 2
    lookup = profile(draft=None, acceptance=[0.5, 0.5], share=0.5)
    assert lookup.speedup[1][2] == pytest.approx((1 + 0.5 * 0.75) * 11 / (11 + 0.5))


def test_where_rows_cost_drafting_stops_paying_with_the_batch():
    pair = profile(draft=0.5, acceptance=[0.6] * 8, slope=0.5)
    assert pair.best(1) > 0
    assert pair.best(64) == 0
    assert pair.pays_up_to == 8
    config = pair.vllm_config("draft_model", "a/draft")
    assert config == {"method": "draft_model", "model": "a/draft", "num_speculative_tokens": pair.best(1)}
    assert "model" not in pair.vllm_config("ngram", None)
    hopeless = profile(draft=9.0, acceptance=[0.3] * 8)
    assert (hopeless.pays_up_to, hopeless.vllm_config("draft_model", "a/draft")) == (None, None)


def test_of_equals_the_shorter_draft_is_the_best():
    pair = profile(draft=None, acceptance=[1.0, 0.0, 0.0])
    assert pair.speedup[1][1] == pair.speedup[1][3]
    assert pair.best(1) == 1


def test_outcomes_are_counted_by_place_and_request():
    controller = ProfilingController(CostModel(PassSeconds([1, 2], [1.0, 1.0])))
    depths = [controller.plan([Candidate("a", 3), Candidate("b", 8)]).num_draft_tokens for _ in range(2)]
    assert depths == [[3, 8], [0, 0]]
    assert controller.select("ab", [[1.0] * 3, []]) == [3, 0]
    assert (controller.num_asked, controller.num_drafted) == (2, 1)
    controller.observe_drafts("a", 2, 1)
    controller.observe_drafts("a", 1, 0)
    assert controller.num_trials["a"][:4] == [2, 1, 1, 0]
    assert controller.num_accepted["a"][:4] == [2, 1, 0, 0]
