"""How often a controller is asked, and hears what steps take and what came of drafts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from specpaged.drafting.draft import NO_DRAFT, Draft
from specpaged.engine import step_clock
from specpaged.engine.call_length import CallLength
from specpaged.engine.draft_planner import DraftPlanner
from specpaged.engine.standing_plan import StandingPlan
from specpaged.engine.step_clock import _MOST_CHANGED, OFTEN
from specpaged.speculation.controller import Plan
from specpaged.speculation.cost_model import CostModel
from specpaged.speculation.octave import octave_of
from specpaged.speculation.pass_seconds import PassSeconds
from specpaged.speculation.stop_rule import StopRule


class Listener:
    """A controller that counts what it hears."""

    def __init__(self):
        self.heard = []

    @property
    def num_heard(self):
        return len(self.heard)

    def observe_target(self, shape, seconds):
        self.heard.append((shape, seconds))

    def observe_rest(self, seconds, num_seqs, num_rounds):
        pass


@pytest.mark.parametrize(("seconds", "share"), [(1e-5, 1 / 64), (4.7e-3, 1 / 40), (1.25e-2, 1 / 15), (2e-1, 1)])
def test_of_long_steps_more_are_heard_as_long_as_it_takes_little_of_the_time(monkeypatch, seconds, share):
    now = 0.0
    monkeypatch.setattr(step_clock, "time", SimpleNamespace(perf_counter=lambda: now))
    listener = Listener()
    planner = DraftPlanner(listener)
    entries = [SimpleNamespace(num_new_tokens=1, draft=NO_DRAFT, context_len=10)]

    def run(num_steps):
        nonlocal now
        before = listener.num_heard
        for _ in range(num_steps):
            planner.begin()
            now += seconds
            if planner.clock.tells:
                planner.clock.scored(entries)
        return listener.num_heard - before

    assert run(OFTEN - 1) == OFTEN - 1
    assert run(2080) == pytest.approx(2080 * share, rel=0.03)


def test_of_each_kind_of_steps_the_first_ones_are_heard_soon_and_a_prefill_puts_nothing_off(monkeypatch):
    now, seconds = 0.0, 4.7e-3  # one in 40, of a kind that is known
    monkeypatch.setattr(step_clock, "time", SimpleNamespace(perf_counter=lambda: now))
    listener = Listener()
    planner = DraftPlanner(listener)

    def run(num_steps, num_seqs, draft=NO_DRAFT, prefills=lambda step: False):
        nonlocal now
        before = listener.num_heard
        for step in range(num_steps):
            planner.begin()
            now += seconds
            if planner.clock.tells:
                num_tokens = 100 if prefills(step) else 1
                entries = [SimpleNamespace(num_new_tokens=1, draft=draft, context_len=10) for _ in range(num_seqs - 1)]
                entries.append(SimpleNamespace(num_new_tokens=num_tokens, draft=draft, context_len=10))
                planner.clock.scored(entries)
        return listener.num_heard - before

    run(200, 8)
    assert run(400, 8) == 10
    assert run(4 * OFTEN + 40, 32) == OFTEN, "batches of another octave"
    assert run(4 * OFTEN + 40, 8, Draft([5])) == OFTEN, "steps that draft"
    assert run(400, 9) == 10
    assert run(400, 9, prefills=lambda step: step % 2) == 10


def test_a_step_in_which_nobody_was_running_makes_nothing_more_frequent(monkeypatch):
    now, seconds = 0.0, 4.7e-3
    monkeypatch.setattr(step_clock, "time", SimpleNamespace(perf_counter=lambda: now))
    listener = Listener()
    clock = DraftPlanner(listener).clock
    entries = [SimpleNamespace(num_new_tokens=1, draft=NO_DRAFT, context_len=10)]

    def run(num_heard):
        nonlocal now
        before, first = listener.num_heard, clock.num_steps
        while listener.num_heard < before + num_heard:
            clock.begin()
            now += seconds
            if clock.tells:
                clock.scored(entries)
        return clock.num_steps - first

    run(60)
    usual = run(4)
    for _ in range(5):
        now += 0.5  # behind the pass of a step that is heard
        assert run(4) > 0.5 * usual


@pytest.mark.parametrize(
    ("seconds", "planned", "looked"), [(1e-5, 1 / 48, 1 / 12), (1.7e-3, 1 / 40, 1 / 12), (1.15e-2, 1 / 6, 1 / 4)]
)
def test_in_short_steps_plans_and_outcomes_are_asked_for_seldom(monkeypatch, seconds, planned, looked):
    now, num_plans, num_looks = 0.0, 0, 0
    monkeypatch.setattr(step_clock, "time", SimpleNamespace(perf_counter=lambda: now))

    def plan(candidates, num_steps):
        nonlocal num_plans
        num_plans += 1
        return Plan([], num_steps=6)

    def selects():
        nonlocal num_looks
        num_looks += 1
        return False

    listener = Listener()
    listener.plan, listener.selects = plan, selects
    planner = DraftPlanner(listener)
    entries = [SimpleNamespace(num_new_tokens=1, draft=NO_DRAFT, context_len=10)]

    def run(num_steps):
        nonlocal now
        for _ in range(num_steps):
            planner.begin()
            now += seconds
            if planner.clock.tells:
                planner.clock.scored(entries)
            planner.plan([])
            planner.select([None], [Draft([5])])

    run(OFTEN)
    assert num_plans == OFTEN // 6 + 1  # as good as it says, while little is known of steps
    assert num_looks == OFTEN
    num_plans = num_looks = 0
    run(4800)
    assert num_plans == pytest.approx(4800 * planned, rel=0.03)
    assert num_looks == pytest.approx(4800 * looked, rel=0.03)


def test_a_plan_that_was_cut_short_by_who_comes_makes_the_next_one_last_longer(monkeypatch):
    now, num_plans = 0.0, 0
    monkeypatch.setattr(step_clock, "time", SimpleNamespace(perf_counter=lambda: now))

    def plan(candidates, num_steps):
        nonlocal num_plans
        num_plans += 1
        return Plan([0] * len(candidates), num_steps=6)

    planner = DraftPlanner(Listener())
    planner.controller.plan = plan
    planner.clock.num_steps, planner.clock._step_seconds = OFTEN + 1, 1.7e-3  # a plan in 40 steps
    members = [Member(), Member()]

    def run(member, num_steps):
        before = num_plans
        for _ in range(num_steps):
            planner.plan([member])
        return num_plans - before

    assert run(members[0], 10) == 1
    assert [run(members[i % 2], 10) for i in range(1, 9)] == [1] * 8  # and none for its age
    assert run(members[0], 1) == 0
    assert run(members[0], 69) == 0  # 80 in all: what the last one had left, up to once more as long
    assert run(members[0], 1) == 1


@pytest.mark.parametrize("tries_rows", [False, True])
def test_of_a_trial_all_steps_are_heard_but_the_first_that_finds_a_drafters_caches_and_none_behind_it(tries_rows):
    planner, listener = trials(tries_rows=tries_rows)
    entries = [SimpleNamespace(num_new_tokens=1, draft=NO_DRAFT, context_len=10)]
    told = []
    for step in range(8):
        if step == 4:
            listener.plan = lambda candidates, num_steps: Plan([], num_steps=4)
        planner.plan([])
        before = listener.num_heard
        planner.begin()
        if planner.clock.tells:
            planner.clock.scored(entries)
        told.append(listener.num_heard - before)
    assert told == [tries_rows, 1, 1, 1, 0, 0, 0, 0]


class Member:
    """As much of a sequence as a planner looks at."""

    max_draft_tokens, output_token_ids, has_ended = 4, (), False
    max_model_draft_tokens, model_drafts = 4, True
    page_table = SimpleNamespace(context_lens=(8,))
    num_tokens = 9
    params = SimpleNamespace(max_tokens=None)
    sampling_request = SimpleNamespace(takes_argmax=True, params=SimpleNamespace(logprobs=None))


def test_a_plan_and_its_rule_go_on_with_who_stays():
    planner = DraftPlanner(Listener())
    members = [Member() for _ in range(4)]
    rule = StopRule(1.0, [0.0], [1.0, 2.0, 3.0], [0.1, 0.2, 0.3], 0.1, 0.0)
    plans = [Plan([3, 0, 2, 4], (), rule, [2, 0, 1, 2], num_steps=9), Plan([0] * 4)]
    planner.controller.plan = lambda candidates, num_steps: plans.pop(0)
    planner.plan(members)
    stay = [members[i] for i in (1, 2, 3)]
    plan = planner.plan(stay)
    assert (plan.num_draft_tokens, plan.without_rule) == ([0, 2, 4], [0, 1, 2])
    assert (plan.stop_rule.leads, plan.stop_rule.expected) == ([2.0, 3.0], [0.2, 0.3])
    planner.expect_calls(CallLength(4), drafts_in_rounds=True)
    assert planner.rounds(stay) == (4, [0, 2, 4], plan.stop_rule, False)  # though it selects: the rule does so
    planner.clock.num_steps, planner._looked_next, planner._num_proposed = 100, 101, OFTEN + 1
    assert planner.rounds(stay)[3]  # nobody is to be asked behind these rounds
    planner.went_on(4)
    assert planner.rounds(stay)[0] == 4
    planner.went_on(4)
    assert planner.rounds(stay)[0] == 1  # the last one before the plan is made anew
    assert not planner.rounds(stay)[3]
    planner.plan([*stay, Member()])
    assert not plans  # who comes might draft as well: asked anew


def test_of_a_trial_in_one_call_all_rounds_are_heard_but_the_first():
    planner, listener = trials()
    planner.plan([])
    for most, expected in ((2, 2), (8, 3)):  # the last one is a call of its own: what is behind it drafts
        planner.expect_calls(CallLength(most, few=most), drafts_in_rounds=False)
        assert planner.rounds([]) == (expected, [], None, True)
    planner.begin()
    assert planner.clock.tells
    entries = [SimpleNamespace(context_len=10), SimpleNamespace(context_len=20)]
    rounds = SimpleNamespace(
        num_rounds=4,
        verify_seconds=[9.0, 2.0, 3.0, 4.0],
        num_unverified=[0, 0, 1, 0],
        num_emitted=[2, 2, 3, 2],
        drafts=False,
        draft_seconds=0.0,
        last_drafting=(0, 0, 0.0),
    )
    planner.clock.ran(entries, rounds)
    assert listener.heard == [((2, 2, 16.0), 2.0), ((3, 2, 17.0), 3.0), ((2, 2, 18.5), 4.0)]


def test_what_deciding_takes_is_no_part_of_what_is_heard(monkeypatch):
    now = 0.0
    monkeypatch.setattr(step_clock, "time", SimpleNamespace(perf_counter=lambda: now))

    def take(seconds, answer=None):
        nonlocal now
        now += seconds
        return answer

    proposals, steps = [], []
    controller = SimpleNamespace(
        observe_target=lambda shape, seconds: take(100.0),
        observe_proposal=lambda passes, seconds, num_seqs, rest, num_rounds: proposals.append((seconds, rest)),
        observe_rest=lambda seconds, num_seqs, num_rounds: steps.append(seconds),
        plan=lambda candidates, num_steps: take(10.0, Plan([])),
        selects=lambda: take(30.0, True),
        select=lambda sequences, evidence: take(50.0, []),
    )
    planner = DraftPlanner(controller)
    entries = [SimpleNamespace(num_new_tokens=1, draft=NO_DRAFT, context_len=10)]
    drafts = Draft([5], [-0.1])
    row = SimpleNamespace(num_draft_tokens=1, token_ids=[4], request_idx=0, num_looked_back=0)
    for proposes in (True, False, False):
        planner.begin()
        take(2.0)
        planner.clock.scored(entries)
        start = take(0.25, now)
        planner.plan([])
        if proposes:
            planner.clock.proposed([row], [drafts])
            planner.select([None], [Draft([5], drafter=1)])
            take(1.0)
        planner.clock.proposed_for(now - start - 0.25)
        take(0.5)
    assert proposals == [(1.0, 0.75)]
    assert steps == [0.75]


@pytest.mark.parametrize("drafts", [False, True])
def test_what_it_takes_a_host_that_requests_end_and_come_is_not_told_of_a_step_unless_it_is_so_in_each(
    monkeypatch, drafts
):
    now = 0.0
    monkeypatch.setattr(step_clock, "time", SimpleNamespace(perf_counter=lambda: now))
    rests = []
    listener = Listener()
    listener.observe_rest = lambda seconds, num_seqs, num_rounds: rests.append(round(seconds, 6))
    listener.observe_proposal = lambda passes, seconds, num_seqs, rest, num_rounds: rests.append(round(rest, 6))
    clock = DraftPlanner(listener).clock

    def run(num_prefilled, num_seqs=2, num_looked_back=0):
        nonlocal now
        entries = [SimpleNamespace(num_new_tokens=1, draft=NO_DRAFT, context_len=10) for _ in range(num_seqs)]
        entries[0].num_new_tokens += num_prefilled
        clock.begin(entries=entries)
        now += 2.0
        if clock.tells:
            clock.scored(entries)
        if clock.tells and drafts:
            row = SimpleNamespace(num_draft_tokens=1, token_ids=[4], request_idx=0, num_looked_back=num_looked_back)
            clock.proposed([row], [Draft([5])])
            clock.proposed_for(0.0)
        now += 0.5 if num_prefilled else 0.25

    for num_prefilled, num_seqs in ((0, 2), (0, 2), (7, 2), (0, 2), (0, 1), (0, 1)):
        run(num_prefilled, num_seqs)
    assert [rest for rest in rests if rest] == [0.25, 0.25]
    assert len(rests) == (4 if drafts else 2), "of the proposal all the same"
    if drafts:
        rests.clear()
        run(0, 1, num_looked_back=3)
        run(0, 1)
        assert rests == [0.25], "a proposal that reads out rows to catch up is of another kind"
    rests.clear()
    run(0, 1)
    rests.clear()
    for step in range(16):
        run(7 * (step % 2))
    assert [rest for rest in rests if rest] == [0.25] * (9 - _MOST_CHANGED)  # of 8, and the one before them


def test_of_rounds_that_draft_those_with_a_proposal_of_their_own_are_counted():
    """One in four, where a call makes the drafts of its further rounds; of 16, where those behind it are made, too."""
    for num_calls, share in ((1, 1 / 4), (4, 1 / 16)):
        planner = DraftPlanner(Listener())
        planner.expect_calls(CallLength(4), drafts_in_rounds=True)
        planner.controller.costs = CostModel(PassSeconds([1, 2], [1.0, 2.0]))
        planner.controller.selects_by_rule = True
        planner.controller.plan = lambda candidates, num_steps: Plan([2], num_steps=1)
        planner.controller.selects = lambda: False
        member = Member()
        member.sampling_request = SimpleNamespace(takes_argmax=True, params=SimpleNamespace(logprobs=None))
        for _ in range(300):
            for _ in range(num_calls - 1):
                planner.went_on(4)
            planner.plan([member], 4)
            planner.select([None], [Draft([5])])
        assert planner.costs.proposals_per_round == pytest.approx(share, rel=0.3)


@pytest.mark.parametrize(
    ("wanted", "num_made", "widths"),
    [([3], 3, [1, 1, 1]), ([3], 2, [1, 1]), ([2, 0, 4], 6, [2, 2, 1, 1]), ([2, 0, 4], 4, [2, 2]), ([4, 4], 7, [2] * 4)],
    ids=["", "stopped", "some", "some, stopped", "less room than wanted"],
)
@pytest.mark.parametrize("follows", [False, True])
def test_of_drafts_made_in_a_call_the_passes_are_heard(wanted, num_made, widths, follows):
    """Heads run the seven tokens of the round before in a pass of its own."""
    planner, listener = trials()
    planner.clock.follows = follows
    listener.observe_drafting = lambda passes, seconds: listener.heard.append((passes, seconds))
    planner.begin()
    rounds = SimpleNamespace(
        num_rounds=1,
        verify_seconds=[9.0],
        num_unverified=[0],
        num_emitted=[2],
        drafts=True,
        draft_seconds=0.5,
        last_drafting=(num_made, 7, 0.5),
        num_wanted=wanted,
    )
    planner.clock.ran([SimpleNamespace(context_len=10)] * len(wanted), rounds)
    first = [(7, len(wanted), 10.0)] if follows else []
    assert listener.heard[1:] == [(first + [(width, width, 10.0) for width in widths], 0.5)]


def test_a_proposal_of_heads_is_told_as_one_pass_more():
    """Two sequences, of which the target has run 3 tokens and 1; the newest one of each has no hidden state yet."""
    heard = []
    for follows, token_ids in ((False, ([1, 2, 3], [1])), (True, ([0, 1, 2, 3], [0, 1]))):
        planner, _ = trials()
        planner.clock.follows = follows
        rows = [
            SimpleNamespace(token_ids=ids, num_draft_tokens=2, request_idx=i, num_looked_back=0)
            for i, ids in enumerate(token_ids)
        ]
        planner.clock.proposed(rows, [Draft([5, 6]), Draft([7])])
        heard.append(planner.clock._passes)
    assert heard == [[(4, 2, 0.0), (1, 1, 0.0)], [(4, 2, 0.0), (2, 2, 0.0), (1, 1, 0.0)]]


def trials(**of_plan):
    """A planner that follows trials of four steps, and whom it tells; nothing else is due."""
    listener = Listener()
    planner = DraftPlanner(listener)
    listener.plan = lambda candidates, num_steps: Plan([], num_steps=4, is_trial=True, **of_plan)
    listener.selects = lambda: False
    planner._selects = False
    planner.clock.num_steps = planner._looked_next = 1 << 20
    planner.clock._told_next = planner.clock.num_steps + 1000
    planner.clock._num_heard[octave_of(1), False] = OFTEN
    return planner, listener


def test_proposals_that_find_nothing_are_counted_and_the_next_one_that_does_is_looked_at():
    """What came of drafts is learned of few proposals: not of those that have none."""
    planner, listener = trials()
    asked, proposed = [], []
    listener.observe_proposed = lambda *of: proposed.append(of)
    planner = DraftPlanner(listener)
    listener.selects = lambda: asked.append(True) or False
    for drafts in ([NO_DRAFT, NO_DRAFT], [NO_DRAFT, NO_DRAFT], [NO_DRAFT, Draft([5])]):
        assert planner.select(["a", "b"], drafts) == drafts
        assert len(asked) == (drafts != [NO_DRAFT, NO_DRAFT])
    assert proposed == [(2, False), (2, False), (2, True)]


def test_what_becomes_of_the_first_drafts_is_looked_at_however_many_steps_there_were_before():
    planner, members = DraftPlanner(Listener()), [Member(), Member()]
    planner.controller.plan = lambda candidates, num_steps: Plan([2, 2], num_steps=10**6)
    planner.controller.selects = lambda: False
    planner.clock.num_steps, planner.clock._step_seconds = 100 * OFTEN, 1e-5
    planner.plan(members)
    num_looked = 0
    for _ in range(3 * OFTEN):
        planner.clock.num_steps += 1
        planner.select(members, [Draft([7, 8]), Draft([7, 8])])
        num_looked += planner.looks_at_rounds
    assert OFTEN - 1 <= num_looked < 1.2 * OFTEN
    lookups = DraftPlanner(Listener())
    for _ in range(OFTEN + 1):
        assert lookups.looks_at_rounds
        lookups.clock.num_steps, lookups._looked_next = 100 * OFTEN, 10**6
        lookups.select(members, [NO_DRAFT, NO_DRAFT])
    assert not lookups.looks_at_rounds, "that nothing is found is known, too"


def test_time_in_which_nobody_is_left_is_no_part_of_a_step(monkeypatch):
    now = 0.0
    monkeypatch.setattr(step_clock, "time", SimpleNamespace(perf_counter=lambda: now))
    for ended in (False, True):
        rests = []
        listener = Listener()
        listener.plan = lambda candidates, num_steps: Plan([0])
        listener.forget = lambda sequence: None
        listener.observe_rest = lambda seconds, *_, rests=rests: rests.append(seconds)
        planner, member = DraftPlanner(listener), Member()
        planner.plan([member])
        planner.begin()
        planner.clock.scored([SimpleNamespace(num_new_tokens=1, draft=NO_DRAFT, context_len=10)])
        if ended:
            planner.forget(member)
        now += 7.0
        planner.begin()
        assert rests == ([] if ended else [7.0])


def test_one_alone_that_comes_like_the_last_one_is_not_planned_for_and_one_that_is_known_is():
    planner, asked = DraftPlanner(Listener()), []
    planner.controller.plan = lambda candidates, num_steps: asked.append(num_steps) or Plan([2], num_steps=6)
    planner.controller.forget = lambda sequence: None
    planner.clock.num_steps, planner.clock._step_seconds = OFTEN + 1, 1.0  # a step is long: no plan is older than 6

    def come(**kwargs):
        member = Member()
        vars(member).update(kwargs)
        num_before = len(asked)
        assert planner.plan([member]).num_draft_tokens == [2]
        planner.forget(member)
        return len(asked) > num_before

    known, sampled = [5, 6], SimpleNamespace(takes_argmax=False, params=SimpleNamespace(logprobs=None))
    assert [come() for _ in range(17)] == [True, *[False] * 15, True]
    assert asked == [1, 16]  # steps since it was asked last
    assert [come(output_token_ids=known), come(), come()] == [True, True, False]
    assert [come(sampling_request=sampled), come(max_draft_tokens=1)] == [True, True]
    assert [come(), come(num_tokens=300)] == [True, True]  # whose passes take another time
    for kind in ({"is_trial": True}, {"lookups": [object()]}):
        planner.controller.plan = lambda candidates, num_steps, kind=kind: asked.append(0) or Plan([2], **kind)
        assert [come(output_token_ids=known), come(), come()] == [True, True, True]


def test_where_calls_have_several_rounds_a_plan_lasts_as_many_of_them_from_the_first_one_on():
    planner = DraftPlanner(Listener())
    planner.controller.plan = lambda candidates, num_steps: Plan([0], num_steps=6)
    planner.clock.num_steps, planner.clock._step_seconds = OFTEN + 1, 0.0115  # a plan in six calls
    for most, num_steps in ((1, 6), (4, 24), (16, 64)):  # and not for ever
        planner.expect_calls(CallLength(most, few=most), drafts_in_rounds=False)
        planner.plan([Member()])
        assert planner._standing.good_for == num_steps
        planner._standing = StandingPlan()


def test_of_a_round_that_a_device_runs_nobody_hears_and_a_rule_is_not_asked():
    listener, told = Listener(), []
    rule = StopRule(1.0, [0.0], [1.0], [0.1], 0.1, 0.0)
    plans = [Plan([3], (), rule, [2]), Plan([3], is_trial=True, tries_rows=True), Plan([3])]
    listener.plan = lambda candidates, num_steps: plans.pop(0)
    listener.observe_drafts = lambda *outcome: told.append(outcome)
    planner = DraftPlanner(listener)
    assert [planner.plan_round([Member()]) for _ in range(3)] == [[2], [0], [3]]
    assert planner.clock.num_steps == 3
    assert listener.num_heard == 0
    assert not planner.clock.is_deaf
    planner.verified("a", 3, 3)
    planner.verified("b", 3, 1)
    assert told == [("a", 3, 0), ("b", 1, 1)]


@pytest.mark.parametrize("waits", [True, False])
def test_a_host_hides_what_it_does_behind_rounds_of_a_device_alone_and_only_if_it_is_late(waits):
    listener, hidden = Listener(), []
    listener.costs = CostModel(PassSeconds([1, 8], [1.0, 2.0]), PassSeconds([1, 8], [0.1, 0.2]))
    listener.plan = lambda candidates, num_steps: hidden.append(listener.costs.hides_host) or Plan([3])
    planner = DraftPlanner(listener)
    planner.leave_to_device(waits)
    planner.plan([Member()])
    planner.plan_round([Member()])
    planner.plan([Member()])
    assert hidden == [False, not waits, False]


def test_what_a_host_has_planned_and_drafted_before_is_not_taken_for_a_devices():
    """A trial of rows goes on without any; and of a draft that was dropped nobody says that it fell."""
    planner, member, told = DraftPlanner(Listener()), Member(), []
    planner.told = lambda *outcome: told.append(outcome)
    planner.controller.selects = lambda: False
    planner.controller.plan = lambda candidates, num_steps: Plan([3], num_steps=4, is_trial=True, tries_rows=True)
    assert planner.plan([member]).num_draft_tokens == [3]
    planner.select([member], [Draft([5, 6])])
    assert planner.plan_round([member]) == [0]
    planner.committed(member, [7])
    assert told, "there were no blocks for a round, and the host has verified it"
    told.clear()
    planner.select([member], [Draft([5, 6])])
    planner.dropped()
    planner.committed(member, [7])
    assert not told


def test_who_is_left_a_plan_has_not_been_idle_while_others_followed_it():
    planner = DraftPlanner(Listener(), follows_target=True)
    planner.controller.plan = lambda candidates, num_steps: Plan([0], num_steps=20)
    planner.controller.forget = lambda sequence: None
    planner.clock.num_steps, planner.clock._step_seconds = OFTEN + 1, 1.0
    for _ in range(3):
        member = Member()
        for _ in range(20):
            planner.plan([member])
        planner.forget(member)
    last = Member()
    for _ in range(21):
        planner.plan([last])
    assert last.max_draft_tokens, "it has been idle for twenty steps of its own"


def test_a_provisional_plan_lasts_no_longer_than_it_says_and_what_comes_of_it_is_looked_at():
    planner = DraftPlanner(Listener())
    planner.clock.num_steps, planner.clock._step_seconds, planner._looked_next = OFTEN + 1, 1e-4, 10**6
    planner._num_proposed = OFTEN + 1
    planner.controller.selects = lambda: False
    for is_provisional in (False, True):
        plan = Plan([2], num_steps=4, is_provisional=is_provisional)
        planner.controller.plan = lambda candidates, num_steps, plan=plan: plan
        planner._selects, sequence = False, Member()
        planner.plan([sequence])
        assert (planner._standing.good_for == 4) == planner.looks_at_rounds == is_provisional
        goes_on = planner.rounds([sequence])[3]
        assert goes_on != is_provisional
        planner.select([sequence], [Draft([7, 8])])
        assert (sequence in planner._proposals) == is_provisional
