"""A plan holds for those whom it is for, as long as it is good."""

from types import SimpleNamespace

import pytest

from specpaged.engine.candidate import Arrival
from specpaged.engine.standing_plan import StandingPlan
from specpaged.speculation.controller import Plan
from specpaged.speculation.lookup_choice import LookupChoice
from specpaged.speculation.repaid_lag import RepaidLag
from specpaged.speculation.stop_rule import StopRule


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
    assert standing.num_unsettled == (3 if 4 * fewest >= num_seqs else 1)


class Newcomer:
    """As much of a sequence as is asked of who has not been planned for."""

    def __init__(self, max_draft_tokens: int = 8, lag: int = 1, max_tokens: int | None = None):
        self.max_draft_tokens = self.max_model_draft_tokens = max_draft_tokens
        self.num_tokens, self.output_token_ids = lag, [0]
        self.page_table = SimpleNamespace(context_lens=[lag, 0], draft_lag=lambda num_tokens: num_tokens)
        self.params = SimpleNamespace(max_tokens=max_tokens)


def test_a_few_that_come_to_many_who_draft_do_as_most_of_those_until_they_are_a_part_of_them():
    counts = [0, 5, 2, 0, 2, 2, 1, 4]
    rule = StopRule(1.0, [0.0], [float(i) for i in range(6)], [0.5] * 6, row_tokens=0.1, pass_tokens=0.2)
    standing = StandingPlan(list("abcdefgh"), Plan(counts, [1], rule, [c // 2 for c in counts], glances=[1]), 0, 99)
    new, modest, third = Newcomer(), Newcomer(1), Newcomer()
    assert standing.holds_for(["a", new, *"cdefgh"])  # in the place of "b"
    assert standing.plan.num_draft_tokens == [0, 2, 2, 0, 2, 2, 1, 4]
    assert standing.plan.without_rule == [0, 1, 1, 0, 1, 1, 0, 2]
    assert standing.plan.stop_rule.leads == [2.0, 1.0, 2.0, 3.0, 4.0, 5.0], "it follows 'e', and 'b' is gone"
    assert standing.plan.looks_back == standing.plan.glances == ()
    assert not standing.holds_for(["a", new, *"cdefg", Newcomer()]), "two of eight"
    many = StandingPlan(list("abcdefgh"), Plan(counts), 0, 99)
    assert many.holds_for([*"abcdefgh", modest])
    assert many.plan.num_draft_tokens == [*counts, 1], "a request's own maximum"
    assert many.holds_for([*"abcdefgh", modest, new])
    assert many.plan.num_draft_tokens == [*counts, 1, 2]
    assert not many.holds_for([*"abcdefgh", modest, new, third])


def test_who_comes_to_others_that_draft_does_not_where_it_is_not_repaid_to_catch_up_and_has_no_more_than_it_may():
    rule = StopRule(1.0, [0.0], [float(i) for i in range(8)], [0.5] * 8, row_tokens=0.1, pass_tokens=0.2)
    plan = Plan([6] * 8, (), rule, [5] * 8, takes_newcomers=True, lag_repaid=RepaidLag(0.5, 120))
    for newcomer, num_drafts, of_rows in (
        (Newcomer(lag=60), 6, [*range(8), 4]),
        (Newcomer(lag=61), 0, range(8)),
        (Newcomer(lag=45, max_tokens=91), 6, [*range(8), 4]),
        (Newcomer(lag=46, max_tokens=91), 0, range(8)),
        (Newcomer(3, lag=60), 3, [*range(8), 4]),
    ):
        standing = StandingPlan(list("abcdefgh"), plan, 0, 99)
        assert standing.holds_for([*"abcdefgh", newcomer])
        assert standing.plan.num_draft_tokens == [6] * 8 + [num_drafts]
        assert standing.plan.without_rule == [5] * 8 + [min(5, num_drafts)]
        assert standing.plan.stop_rule.leads == list(map(float, of_rows))


def test_a_trial_does_not_settle_what_a_text_that_has_turned_is_to_have():
    standing = StandingPlan(["a"], Plan([4]), 0, 9)
    standing.ends_with_turn()
    assert standing.still_unsettled(["a"], Plan([4], is_trial=True)) == 3
    trial = StandingPlan(["a"], Plan([2], is_trial=True), 0, 4, None, standing.decided)
    trial.num_unsettled = 3
    assert trial.still_unsettled(["a"], Plan([2])) == 3, "fewer than before the trial"
    assert trial.still_unsettled(["a"], Plan([4])) == 0
    assert StandingPlan(["a"], Plan([2], is_trial=True), 0, 4, None, trial.decided).decided == [4]


@pytest.mark.parametrize(
    "plan",
    [Plan([2] * 8, is_trial=True), Plan([2] * 8, is_provisional=True), Plan([2] * 8, lookups=[LookupChoice(3)] * 8)],
)
def test_nobody_comes_to_a_plan_that_is_to_find_something_out_or_knows_texts(plan):
    assert not StandingPlan(list("abcdefgh"), plan, 0, 99).holds_for([*"abcdefgh", Newcomer()])


def test_where_requests_are_alike_all_who_come_do_as_the_others_until_most_are_new():
    standing = StandingPlan(list("abcdefgh"), Plan([2] * 8, takes_newcomers=True), 0, 99)
    few, many = [Newcomer() for _ in range(4)], [Newcomer() for _ in range(5)]
    assert standing.holds_for([*"abcd", *few])
    assert standing.plan.num_draft_tokens == [2] * 8
    assert standing.holds_for([Newcomer(), *"bcd", *few]), "more have come than there are"
    assert not standing.holds_for([*few[:3], *many])


def test_who_comes_to_a_few_that_draft_is_planned_for():
    assert not StandingPlan(list("abc"), Plan([2, 2, 2]), 0, 99).holds_for([*"abc", Newcomer()])


def stands_for_one_alone(arrival: Arrival, plan: Plan) -> StandingPlan:
    """Six of nine steps into a plan for "a", which has ended."""
    standing = StandingPlan(["a"], plan, 0, 9, arrival)
    standing.age = 6
    standing.forget("a")
    return standing


def test_a_plan_for_one_alone_is_left_to_some_that_come_like_it():
    arrival = Arrival(40, 100)
    standing = stands_for_one_alone(arrival, Plan([3], [0]))
    for number, heir in enumerate("bcdefghijklmnop"):
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
    assert not standing.is_left_to("q", arrival)


@pytest.mark.parametrize("num_drafts", [3, 0])
def test_who_would_be_planned_otherwise_than_whom_a_plan_was_for_does_not_follow_it(num_drafts):
    """With half a token to catch up with for each that may come, of 120 at most, it drafts; with more, it does not."""
    plan = Plan([num_drafts], lag_repaid=RepaidLag(0.5, 120))
    repaid = [Arrival(40, 100), Arrival(50, 100), Arrival(40, 80), Arrival(60, 999), Arrival(60, None), Arrival(4, 1)]
    too_far = [Arrival(51, 100), Arrival(40, 79), Arrival(61, 999), Arrival(61, None), Arrival(5, 1)]
    alike, others = (repaid, too_far) if num_drafts else (too_far, repaid)
    for arrival in alike:
        assert stands_for_one_alone(alike[0], plan).is_left_to("b", arrival)
    for arrival in [*others, alike[0]._replace(kind="sampled")]:
        assert not stands_for_one_alone(alike[0], plan).is_left_to("b", arrival)


def test_where_to_catch_up_is_no_reason_all_follow_who_are_of_one_kind():
    for num_drafts in (3, 0):
        standing = stands_for_one_alone(Arrival(40, 100), Plan([num_drafts]))
        assert standing.is_left_to("b", Arrival(400, 1))


def test_what_was_planned_for_one_that_is_known_or_not_alone_is_left_to_nobody():
    arrival = Arrival(40, 100)
    for standing in (StandingPlan(["a"], Plan([3]), 0, 9), StandingPlan(["a", "b"], Plan([3, 3]), 0, 9)):
        standing.forget("b")
        standing.forget("a")
        assert not standing.is_left_to("c", arrival)
