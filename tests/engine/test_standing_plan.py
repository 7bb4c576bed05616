"""A plan holds for those whom it is for, as long as it is good."""

import pytest

from specpaged.engine.standing_plan import Arrival, StandingPlan
from specpaged.speculation.controller import Plan


def test_a_plan_looks_back_once_and_stands_until_it_is_old():
    standing = StandingPlan(["a", "b"], Plan([3, 0], [1], glances=[1]), 0, 2)
    assert standing.drafts
    assert (standing.plan.looks_back, standing.plan.glances) == ([1], [1])
    assert (standing.again.looks_back, standing.again.glances) == ((), ())
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


def test_a_plan_that_goes_on_without_somebody_looks_at_nobody():
    """Looks are by place among those whom the plan was made for."""
    standing = StandingPlan(["a", "b"], Plan([3, 0], [1], glances=[1]), 0, 9)
    standing.forget("b")
    assert standing.holds_for(["a"])
    assert (standing.plan.looks_back, standing.plan.glances, standing.again.glances) == ((), (), ())


@pytest.mark.parametrize(("num_seqs", "fewest"), [(1, 1), (8, 1), (9, 2), (64, 8)])
def test_a_plan_ends_when_a_part_of_its_texts_has_turned(num_seqs, fewest):
    standing = StandingPlan(list(range(num_seqs)), Plan([1] * num_seqs), 0, 9)
    for _ in range(fewest):
        assert standing.holds_for(list(range(num_seqs)))
        standing.ends_with_turn()
    assert not standing.holds_for(list(range(num_seqs)))
    assert standing.num_unsettled > 0


def stands_for_one_alone(arrival: Arrival, plan: Plan) -> StandingPlan:
    """Six of nine steps into a plan for "a", which has ended."""
    standing = StandingPlan(["a"], plan, 0, 9, arrival)
    standing.age = 6
    standing.forget("a")
    return standing


def test_a_plan_for_one_alone_is_left_to_three_that_come_like_it():
    arrival = Arrival(40, 100)
    standing = stands_for_one_alone(arrival, Plan([3], [0]))
    for number, heir in enumerate("bcd"):
        assert not standing.drafts
        assert not standing.holds_for([heir])
        assert standing.is_left_to(heir, arrival)
        assert (standing.again.num_draft_tokens, standing.again.looks_back) == ([3], ())
        assert standing.num_left == 9
        assert standing.holds_for([heir])
        assert not standing.is_left_to(heir, arrival), "it has been taken"
        standing.age += 6
        standing.forget(heir)
        assert standing.age == 6 * (number + 2), "steps since anybody was asked"
    assert not standing.is_left_to("e", arrival)


@pytest.mark.parametrize(("num_drafts", "reasons"), [(3, (39, 101)), (0, (41, 99))])
def test_who_had_less_reason_to_follow_a_plan_than_whom_it_was_for_does_not(num_drafts, reasons):
    lag, num_left = reasons
    for arrival in (Arrival(40, 100), Arrival(lag, 100), Arrival(40, num_left), Arrival(lag, num_left)):
        assert stands_for_one_alone(Arrival(40, 100), Plan([num_drafts])).is_left_to("b", arrival)
    for arrival in (Arrival(80 - lag, 100), Arrival(40, 200 - num_left), Arrival(40, 100, kind="sampled")):
        assert not stands_for_one_alone(Arrival(40, 100), Plan([num_drafts])).is_left_to("b", arrival)


def test_what_was_planned_for_one_that_is_known_or_not_alone_is_left_to_nobody():
    arrival = Arrival(40, 100)
    for standing in (StandingPlan(["a"], Plan([3]), 0, 9), StandingPlan(["a", "b"], Plan([3, 3]), 0, 9)):
        standing.forget("b")
        standing.forget("a")
        assert not standing.is_left_to("c", arrival)
