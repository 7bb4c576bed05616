"""A plan holds for those whom it is for, as long as it is good."""

from specpaged.engine.standing_plan import StandingPlan
from specpaged.speculation.controller import Plan


def test_a_plan_looks_back_once_and_stands_until_it_is_old():
    standing = StandingPlan(["a", "b"], Plan([3, 0], [1]), 0, 2)
    assert standing.drafts
    assert (standing.plan.looks_back, standing.again.looks_back) == ([1], ())
    assert standing.holds_for(["a", "b"])
    standing.age = 2
    assert standing.num_left == 0
    assert not standing.holds_for(["a", "b"])


def test_nothing_is_left_of_a_plan_whose_last_sequence_has_ended():
    standing = StandingPlan(["a", "b"], Plan([3, 2]), 0, 9)
    standing.forget("a")
    assert (standing.sequences, standing.again.num_draft_tokens) == (["b"], [2])
    standing.forget("b")
    assert not standing.drafts
    assert standing.again == Plan([])
    assert not standing.holds_for(["c"])
