"""Who drafts for whom: a lookup where its draft promises more than the model's, each by what came of its own."""

from __future__ import annotations

import pytest

from specpaged.speculation.acceptance import logit
from specpaged.speculation.adaptive import AdaptiveController
from specpaged.speculation.combined import CombinedController
from specpaged.speculation.controller import Candidate
from specpaged.speculation.cost_model import CostModel
from specpaged.speculation.lookup_choice import LookupChoice
from specpaged.speculation.pass_seconds import PassSeconds
from specpaged.speculation.stop_rule import StopRule

MOST = 6


def controller(draft_ms: float | None = 1.0, num_lookups: int = 2, follows: bool = False) -> CombinedController:
    """Of a target whose passes take 10 ms, and a tenth more for each row beyond the first."""
    target = PassSeconds([1, 101], [0.010, 0.110])
    draft = None if draft_ms is None else PassSeconds([1, 101], [draft_ms / 1e3, draft_ms / 1e3])
    costs = CostModel(target, draft)
    if follows:
        costs = CostModel(target, draft, following=PassSeconds([1, 101], [1e-4, 1e-4]), first_share=0.5)
    model = None if draft is None else AdaptiveController(costs, looks_back=not follows)
    return CombinedController(costs, num_lookups, model, follows)


def choices(of: CombinedController, names="a", drafts=True) -> list[LookupChoice]:
    """The choice of each sequence, where their model's drafts have mostly stood, or fallen."""
    for _ in range(40):
        for name in names:
            of.observe_drafts(name, *((4, 1) if drafts else (0, 1)), [0.0] * 5)
    for _ in range(3):
        plan = of.plan([Candidate(name, MOST) for name in names], 4)
        if not plan.is_trial and any(plan.num_draft_tokens) == drafts:
            return list(plan.lookups)
    raise AssertionError(plan)


def test_a_draft_that_promises_most_is_taken_up_to_where_its_rows_are_worth_it():
    rule = StopRule(1.0, [0.0], [0.0], [1.0], row_tokens=0.3, pass_tokens=0.0)
    choice = LookupChoice(MOST, 0.2, [rule, rule])
    assert choice.choose([[], []])[1] == 0
    assert choice.choose([[logit(0.9)], [logit(0.8)] * 3]) == (1, 3)  # 0.6 to 0.5 + 0.34 + 0.212
    assert choice.choose([[logit(0.8)] * 9, []]) == (0, 5)  # 0.8 ** 6 < 0.3
    assert choice.choose([[logit(0.8)] * 3, [logit(0.8)] * 3])[0] == 0  # of equals the first
    assert choice.choose([[logit(0.45)], []])[1] == 0  # 0.15
    assert choice.choose([[float("nan")] * 3, [logit(0.2)]])[1] == 0


def test_where_nothing_is_decided_evidence_is_taken_at_its_word():
    choice = LookupChoice(4, 2.0)
    assert choice.choose([[logit(0.8)] * 4]) == (0, 4)
    assert choice.choose([[logit(0.7)] * 4])[1] == 0
    assert LookupChoice(4).choose([[logit(0.1)]]) == (0, 1)  # nobody else drafts


def test_the_dearer_the_models_passes_the_less_a_lookup_has_to_promise():
    cheap, dear = (choices(controller(draft_ms))[0] for draft_ms in (0.1, 1.0))
    assert cheap.least > dear.least > 0.0
    follows = choices(controller(1.0, follows=True))[0]  # whose layers have run by the first draft
    assert follows.least > dear.least
    weak = [logit(0.55)] * 4
    assert cheap.choose([weak, ()])[1] == 0
    assert dear.choose([[logit(0.97)] * MOST, ()]) == (0, MOST)


def test_where_the_model_does_not_draft_whatever_is_worth_its_rows_is_taken():
    for of in (controller(None), controller(1.0)):
        choice = choices(of, drafts=False)[0] if of.model else of.plan([Candidate("a", MOST)]).lookups[0]
        assert choice.least == 0.0
        assert choice.choose([[logit(0.5)] * 2, ()])[1] == 2
        assert choice.choose([[logit(0.05)] * 2, ()])[1] == 0  # a row takes a tenth of a step


def test_each_lookup_is_calibrated_by_its_own_outcomes_alone():
    of, evidence = controller(), [logit(0.9)] * 4
    before = choices(of)[0]
    assert before.choose([evidence, ()])[1] > 0
    assert before.choose([(), evidence])[1] > 0
    for _ in range(150):
        of.observe_lookup(0, "a", 0, 1, evidence)
        of.observe_lookup(1, "a", 4, 0, evidence)
    after = choices(of)[0]
    assert after.choose([evidence, ()])[1] == 0
    assert after.choose([evidence, evidence]) == (1, 4)
    assert after.least == pytest.approx(before.least, rel=0.2)  # nor is the model's


def test_what_a_lookup_says_too_low_of_all_is_found_out_after_some_outcomes():
    of, evidence = controller(None, 1), [logit(0.5)] * 4
    before = of.plan([Candidate("a", MOST)]).lookups[0].choose([evidence])[1]
    for _ in range(10):
        of.observe_lookup(0, "b", 4, 0, evidence)
    assert before < of.plan([Candidate("a", MOST)]).lookups[0].choose([evidence])[1] == 4


def test_who_has_ended_is_forgotten_by_all():
    of = controller()
    choices(of, "ab")
    of.observe_lookup(1, "a", 1, 0, [1.0])
    for name in "ab":
        of.forget(name)
    assert of.num_requests == 0


def test_who_may_have_no_drafts_has_no_choice():
    plan = controller(None).plan([Candidate("a", 0), Candidate("b", 3)])
    assert plan.lookups[0] is None
    assert plan.lookups[1].num_tokens == 3
    assert plan.num_draft_tokens == [0, 0]
