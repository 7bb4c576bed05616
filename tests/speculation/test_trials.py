"""When steps of other kinds are tried, and what."""

from __future__ import annotations

import pytest

from specpaged.speculation.adaptive import AdaptiveController
from specpaged.speculation.controller import Candidate
from specpaged.speculation.lookups import LookupController
from specpaged.speculation.selection import select
from specpaged.speculation.step_times import StepTimes
from specpaged.speculation.trials import TRIAL_STEPS, Trials
from tests.speculation.simulation import costs, knowing


def expected(row_seconds, most, num_seqs=3):
    """Drafts of which each stands with 0.7, in steps of 10 s and so much for each row."""
    verify_seconds = [10.0 + row_seconds * n for n in range(1 + num_seqs * most)]
    times = StepTimes(0.0, 10.0, verify_seconds, [0.0] * (1 + num_seqs), [0.0] * (1 + num_seqs), 0.0)
    return [[0.7**j for j in range(1, 1 + most)]] * num_seqs, times


def tried(trials, counts, speed, expected, num_steps=600):
    """The steps, and the drafts, of the trials that there are in so many steps."""
    found = [(step, trials.next(counts, speed, 1, lambda: expected)) for step in range(num_steps)]
    return [(step, counts) for step, counts in found if counts is not None]


def test_where_drafting_gains_little_half_of_the_drafts_and_none_are_tried_by_turns_and_ever_less_often():
    found = tried(Trials(costs(0.15).errors), [4, 1, 0], 1.02, expected(9.0, 6), 500)
    assert [counts for _, counts in found] == [[2, 1, 0], [0, 0, 0]] * 2 + [[2, 1, 0]]
    steps = [step for step, _ in found]
    assert [later - step for step, later in zip([-1, *steps], steps, strict=False)] == [16, 32, 64, 128, 256]


def test_while_the_rest_of_plain_steps_is_in_doubt_none_are_tried_soon_and_six_times_at_most():
    """Though what passes take leaves no doubt that drafting gains; but only so often, as nobody may listen: then as
    seldom as anybody.
    """
    trials, found = Trials(costs(0.15).errors), []
    for step in range(1000):
        if (counts := trials.next([4, 1, 0], 1.5, 1, lambda: expected(9.0, 6), rest_doubt=0.3)) is not None:
            found.append((step, counts))
    soon, seldom = range(15, 111, 16), (95 + 128, 95 + 128 + 256, 95 + 128 + 256 + 512)
    assert found == [(step, [0, 0, 0]) for step in (*soon, *seldom)]
    assert trials.next([1] * 8, 1.5, 16, lambda: expected(9.0, 6, 8), rest_doubt=0.3) == [0] * 8, "another octave"
    assert trials.next([1] * 8, 1.5, 16, lambda: expected(9.0, 6, 8), rest_doubt=0.001) is None


def test_who_gains_by_drafting_beyond_doubt_seldom_tries_none():
    """What is beyond doubt is only believed: who never looks never finds out that it is wrong."""
    found = tried(Trials(costs(0.15).errors), [4], 3.0, expected(9.0, 6, 1))
    assert found == [(128 - 1, [0]), (128 + 256 - 1, [0])]


def test_where_a_neighbour_may_have_come_and_gone_with_one_the_next_is_soon():
    trials = Trials(costs(0.15).errors)
    assert tried(trials, [4], 3.0, expected(9.0, 6, 1), 500)[-1] == (128 + 256 - 1, [0])
    trials.errors._undoing = 1.0
    assert trials.errors.suspects
    assert tried(trials, [4], 3.0, expected(9.0, 6, 1), 100)[0] == (27, [0])  # that is asked every 16 steps


def tried_more(errors, counts, expected):
    """Of who gains by drafting beyond doubt, the trials of more drafts; seldom there are some of none."""
    return [(step, more) for step, more in tried(Trials(errors), counts, 3.0, expected) if any(more)]


def test_more_are_tried_whatever_is_gained_where_they_might_be_better_and_ever_less_often():
    """One draft each is best, and if further rows took less, by as much as is in doubt, two."""
    chances, times = expected(1.6, 6)
    assert select(chances, times.verify).counts == [1, 1, 1]
    errors = costs(0.15).errors
    found = tried_more(errors, [1, 1, 1], (chances, times))
    assert [counts for _, counts in found] == [[2, 2, 2]] * 4
    steps = [step for step, _ in found]
    assert [later - step for step, later in zip([-1, *steps], steps, strict=False)] == [32, 64, 128, 256]
    assert not tried_more(errors, [1, 1, 1], expected(9.0, 6))  # rows are too dear
    assert not tried_more(errors, [6, 6, 6], expected(0.1, 6))  # there are no more
    errors._covariance = [[0.0] * len(row) for row in errors._covariance]
    assert not tried_more(errors, [1, 1, 1], (chances, times))


def test_more_are_twice_as_many_for_who_drafts_and_no_more_than_there_may_be():
    assert tried(Trials(costs(0.15).errors), [4, 1, 0], 3.0, expected(0.1, 6))[0] == (31, [6, 2, 0])


def test_a_controller_that_drafts_by_a_narrow_margin_has_its_trials():
    controller = knowing(AdaptiveController(costs(0.15)))
    plans = [controller.plan([Candidate(i, 8) for i in range(6)], 1) for _ in range(60)]
    assert any(plans[0].num_draft_tokens)
    trials = [plan for plan in plans if plan.is_trial]
    assert trials
    assert all(plan.num_steps == TRIAL_STEPS for plan in trials)


def test_a_controller_that_has_heard_only_steps_that_draft_tries_none_until_it_has_heard_a_few_plain_ones():
    """What else is in doubt is left out: drafting gains more than that."""
    controller = knowing(AdaptiveController(costs(0.4)))
    of_costs = controller.costs
    of_costs.errors._covariance = [[0.0] * len(row) for row in of_costs.errors._covariance]
    candidates = [Candidate(i, 8) for i in range(2)]

    def plain_trials(num_plans):
        plans = [controller.plan(candidates, 1) for _ in range(num_plans)]
        assert any(plans[0].num_draft_tokens)
        return sum(plan.is_trial and not any(plan.num_draft_tokens) for plan in plans)

    assert plain_trials(60) == 0
    rest = 3.0 * of_costs.target.of_rows(2)
    of_costs.expect_rest(rest, 0.0)
    for _ in range(40):
        of_costs.observe_proposal([], 1e-4, 2, rest)
    controller._times.expire()
    assert plain_trials(60) == 4, "behind sixteen steps each"
    for _ in range(5):
        of_costs.observe_rest(0.9 * rest, 2)
    controller._times.expire()
    assert plain_trials(60) == 0


def test_drafts_of_a_trial_are_verified_whole():
    """Selected from, they would be as few as before: the passes that are to be timed would never run."""
    controller = knowing(AdaptiveController(costs(0.15)))
    selects = {True: set(), False: set()}
    for _ in range(60):
        plan = controller.plan([Candidate(i, 8) for i in range(6)], 1)
        selects[plan.is_trial].add(controller.selects())
    assert selects == {True: {False}, False: {True}}


def test_a_trial_of_which_nothing_was_heard_comes_again_as_soon():
    trials = Trials(costs(0.15).errors)
    found = []
    for step in range(200):
        if trials.next([4, 1, 0], 1.02, 1, lambda: expected(9.0, 6)) is not None:
            found.append(step)
            if len(found) < 4:
                trials.was_cut_short(1)
    assert [later - step for step, later in zip([-1, *found], found, strict=False)] == [16, 16, 16, 16, 32, 64]


def test_a_trial_of_rows_of_which_nothing_was_heard_comes_again_and_is_nobody_elses():
    trials = Trials(costs(0.15).errors)
    assert trials.next([4, 1, 0], 1.02, 16, lambda: expected(9.0, 6)) is not None

    def next_rows(seconds):
        return trials.next_rows(4, seconds, lambda by: [3] * 4, lambda num_rows: 1.0)

    assert next_rows(0.0) is None
    assert next_rows(0.0) is not None
    trials.was_cut_short(1)
    assert not any(next_rows(50.0) for _ in range(3)), "in advance once alone: the sequences may change in every step"
    assert next_rows(50.0) is not None, "half of its price was lost, and 0.3 % of the time are saved"
    assert next_rows(300.0) is None
    found = [step for step in range(100) if trials.next([4, 1, 0], 1.02, 1, lambda: expected(9.0, 6)) is not None]
    assert found == [31, 95], "who tries fewer was not cut short"


def test_a_controller_takes_a_trial_to_be_cut_short_if_it_is_asked_again_before_anything_was_heard():
    for num_steps, num_cut in ((1, True), (2, False)):
        controller = knowing(AdaptiveController(costs(0.15)))
        cut = []
        controller.trials.was_cut_short = cut.append
        was_trial = False
        for _ in range(60):
            was_trial = controller.plan([Candidate(i, 8) for i in range(6)], num_steps if was_trial else 1).is_trial
        assert bool(cut) == num_cut


@pytest.mark.parametrize("controller", [AdaptiveController(costs(0.15)), LookupController(costs(None))], ids=type)
def test_a_controller_says_when_drafts_are_made(controller):
    """So that no trial is in advance right behind them."""
    candidates = [Candidate(i, 8) for i in range(4)]
    told = []
    controller.trials.drafts_are_made = lambda: told.append(None)
    for i in range(40):
        num_told = len(told)
        plan = controller.plan(candidates, 8)
        drafts = (any(plan.num_draft_tokens) or plan.is_trial) and not plan.tries_rows  # or would, but for a trial
        assert (len(told) > num_told) == drafts
        for candidate in candidates:
            controller.observe_drafts(candidate.sequence, 3, int(i % 2), [2.0] * 4)
    assert told


@pytest.mark.parametrize("overlaps", [False, True])
def test_among_halves_where_nobody_listens_no_trial_is_asked_for(overlaps):
    controller = knowing(AdaptiveController(costs(0.15)))
    controller.costs.overlaps = overlaps
    asked = []
    controller.trials.next = lambda *arguments: asked.append(arguments)
    plans = [controller.plan([Candidate(i, 8) for i in range(6)], 1) for _ in range(20)]
    assert all(any(plan.num_draft_tokens) for plan in plans)
    assert bool(asked) != overlaps


def test_a_gain_that_is_in_doubt_is_not_taken():
    """Of eight sequences, whose drafts would gain some 4 %, if passes take what they are thought to."""
    for in_doubt in (True, False):
        controller = knowing(AdaptiveController(costs(0.15)))
        if not in_doubt:
            errors = controller.costs.errors
            errors._covariance = [[0.0] * len(row) for row in errors._covariance]
        for _ in range(2):  # at first there are no plain steps that others could be compared with
            plan = controller.plan([Candidate(i, 8) for i in range(8)], 1)
        assert plan.tries_rows == in_doubt  # so that it is known the next time
        assert (any(plan.num_draft_tokens) and not plan.is_trial) != in_doubt


def test_rows_are_tried_once_in_each_octave_and_then_when_there_is_time_as_long_as_they_might_pay():
    errors = costs(0.15).errors
    trials = Trials(errors)
    asked = []

    def next_rows(num_seqs, seconds):
        return trials.next_rows(
            num_seqs, seconds, lambda by: asked.append(by) or [3, 0] * (num_seqs // 2), lambda num_rows: 1e-3 * num_rows
        )

    assert next_rows(4, 0.0) is None
    assert next_rows(4, 0.0) == [2, 1, 2, 1]
    assert set(asked) == {2 * errors.doubt(4, 12)}
    for seconds in (0.2, 0.2, 0.6):  # 6 ms are saved, of 0.3 % of the time until the third one, and then of 0.1 %
        assert not any(next_rows(n, seconds) for n in (4, 5, 7, 4, 5, 7, 4, 5, 7))
        assert next_rows(4, 1.5 * seconds) == [2, 1, 2, 1]
    assert next_rows(16, 0.0) is None
    assert next_rows(16, 0.0) == [2, 1] * 8, "of these nothing is known"
    assert not any(next_rows(16, 2.0) for _ in range(3))  # 24 ms
    assert next_rows(16, 2.5) == [2, 1] * 8
    assert sum(next_rows(4, 2.0) is not None for _ in range(100)) in (29, 30, 31)  # 6 ms each, behind the first one
    assert next_rows(64, 0.0) is None
    trials.drafts_are_made()
    assert next_rows(64, 0.0) is None, "behind drafts there is nothing to compare with"
    assert next_rows(64, 0.0) is not None
    num_asked = len(asked)
    trials = Trials(errors)
    errors._covariance = [[0.0] * len(row) for row in errors._covariance]
    assert next_rows(4, 100.0) is None
    assert len(asked) == num_asked
