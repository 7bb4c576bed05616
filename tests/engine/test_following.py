"""A text that turns in the middle of an output is followed: plans end, and who does not draft is looked at."""

from __future__ import annotations

import pytest

from specpaged import LLM, SamplingParams
from specpaged.drafting.draft import Draft
from specpaged.engine.draft_planner import _SOON, DraftPlanner
from specpaged.engine.standing_plan import _UNSETTLED
from specpaged.engine.step_clock import OFTEN
from specpaged.speculation.adaptive import AdaptiveController
from specpaged.speculation.controller import Controller, Plan
from specpaged.testing import synthetic_pair
from tests import toys
from tests.engine.test_draft_planner import Member
from tests.engine.test_engine import generate, make_llm
from tests.speculation.simulation import PLAIN_SECONDS, costs

LOOKS_AGAIN = Controller.looks_in  # steps


class Planned:
    """Says how many drafts are planned, and whom to look back at; and keeps what it is told."""

    looks_in = LOOKS_AGAIN

    def __init__(self, draft=0.05):
        self.costs = costs(draft)
        self.num_drafts, self.lookups, self.num_steps = 3, (), 6
        self.num_plans = 0
        self.asked_to_look = []  # steps since it was asked last
        self.outcomes = []

    def plan(self, candidates, num_steps):
        self.num_plans += 1
        return Plan([self.num_drafts] * len(candidates), num_steps=self.num_steps, lookups=self.lookups)

    def look(self, candidates, num_steps):
        self.asked_to_look.append(num_steps)
        return [0], [0]

    def observe_outcomes(self, sequence, num_accepted, num_rejected):
        self.outcomes.append((num_accepted, num_rejected))

    def __getattr__(self, name):
        return lambda *_: None


def planner_of(controller, step_seconds=1e-3):
    planner = DraftPlanner(controller)
    planner.clock.num_steps, planner.clock._step_seconds = OFTEN + 1, step_seconds
    planner.calls.may_draft = True
    return planner


def test_where_drafts_come_to_fall_the_plan_ends_and_the_next_ones_are_provisional():
    controller = Planned()
    planner, member = planner_of(controller), Member()
    planner.plan([member])
    for _ in range(6):
        planner.fared(member, (3, 3, 3), (3, 3, 3))
    planner.plan([member])
    assert controller.num_plans == 1
    assert not controller.outcomes, "the controller hears of them by and by"
    planner.fared(member, (3, 3, 3, 3, 3, 3), (0, 0, 1, 0, 0, 0))
    assert controller.outcomes == [(1, 6)]
    assert planner.rounds([member])[0] == 1, "one round is there already, and then it is planned"
    provisional = []
    for num_drafts in range(_UNSETTLED + 1):
        controller.num_drafts = num_drafts
        planner.plan([member])
        provisional.append(planner._standing.plan.is_provisional)
        planner._standing.age = planner._standing.good_for
    assert provisional == [True] * _UNSETTLED + [False]


@pytest.mark.parametrize("num_drafts", [3, 0])
def test_where_as_much_is_drafted_behind_a_turn_as_before_nothing_more_is_to_be_found_out(num_drafts):
    """But where nothing is drafted: there, nobody has seen yet what would come of drafts now."""
    controller = Planned()
    controller.num_drafts = num_drafts
    planner, member = planner_of(controller), Member()
    planner.plan([member])
    planner._standing.ends_with_turn()
    provisional = []
    for _ in range(_UNSETTLED + 1):
        planner.plan([member])
        provisional.append(planner._standing.plan.is_provisional)
        planner._standing.age = planner._standing.good_for
    assert provisional == [num_drafts == 0] * _UNSETTLED + [False]
    assert controller.num_plans == _UNSETTLED + 2


def test_of_lookups_drafts_no_plan_ends():
    for controller in (Planned(draft=None), Planned()):
        controller.lookups = [object()]
        planner, member = planner_of(controller), Member()
        planner.plan([member])
        for num_accepted in (3, 3, 3, 3, 0, 0, 0):
            planner.fared(member, (3,) * 6, (num_accepted,) * 6)
        planner.plan([member])
        assert controller.num_plans == 1
        assert not controller.outcomes


def test_while_a_plan_without_drafts_stands_it_is_asked_whom_to_look_back_at():
    controller = Planned()
    controller.num_drafts, controller.num_steps = 0, 100
    planner, member = planner_of(controller, step_seconds=0.1), Member()
    plans = [planner.plan([member]) for _ in range(LOOKS_AGAIN + 1)]
    assert controller.num_plans == 1
    assert controller.asked_to_look == [LOOKS_AGAIN]
    assert [tuple(plan.glances) for plan in plans] == [()] * LOOKS_AGAIN + [(0,)]
    assert plans[-1].num_draft_tokens == [0]
    assert not planner.plan([member]).looks_back
    assert planner.rounds([member])[3], "what comes behind one round is known"
    planner.went_on(LOOKS_AGAIN - 2)
    assert not planner.rounds([member])[3], "somebody is to be asked"


def test_it_is_asked_again_when_the_controller_has_said():
    controller = Planned()
    controller.num_drafts, controller.num_steps = 0, 100
    planner, member = planner_of(controller, step_seconds=0.1), Member()
    for looks_in in (5, 7, 60):
        controller.looks_in = looks_in
        planner.plan([member])  # anew, or looking again
        for _ in range(looks_in - 1):
            planner.plan([member])
    assert controller.asked_to_look == [5, 7]


def test_who_drafts_and_heads_are_not_asked_whom_to_look_back_at():
    for follows in (False, True):
        controller, member = Planned(), Member()
        controller.num_drafts, controller.num_steps = 0 if follows else 3, 100
        planner = DraftPlanner(controller, follows_target=follows)
        for _ in range(3 * LOOKS_AGAIN):
            planner.plan([member])
        assert not controller.asked_to_look


@pytest.mark.parametrize(("num_stood", "num_plans"), [(0, 1), (8, 2)])
def test_what_a_look_sees_ends_a_plan_where_the_text_has_turned(num_stood, num_plans):
    controller, member = Planned(), Member()
    controller.num_drafts = 0
    planner = planner_of(controller)
    member.token_ids, member.num_tokens = list(range(8)), 8
    planner.plan([member])
    for fell in (*[8] * 4, 8 - num_stood):
        planner.look_back(member, [*[-1] * fell, *range(fell, 8)])
    planner.plan([member])
    assert controller.num_plans == num_plans
    assert controller.outcomes[-1] == (num_stood, 8 - num_stood)


TURNS_AFTER = 160


@pytest.fixture(scope="module")
def turning_pair(tmp_path_factory):
    """Drafts of every output stand with 0.9 and with 0.05 in turn, for so many tokens each."""
    shape = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 1280, "hidden_size": 32,
        "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
        "head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    return synthetic_pair(
        shape, shape, directory=tmp_path_factory.mktemp("turning"), acceptance=(0.9, 0.05),
        turns_after=TURNS_AFTER, dtype="float32",
    )  # fmt: skip


def test_an_engine_follows_each_turn_of_a_text_within_64_tokens(turning_pair):
    """As its controller plans on simulated time: the draft takes a twentieth of the target, plain calls 4 ms."""
    speculative = {"model": turning_pair.draft, "num_speculative_tokens": "auto"}
    llm = LLM(turning_pair.target, speculative_config=speculative, max_model_len=1024, numerics="exact")
    step, metrics = llm.engine.speculative_step, llm.metrics
    planner = step.planner = DraftPlanner(AdaptiveController(costs(0.05)))
    planner.expect_calls(step.call_length, drafts_in_rounds=True)
    planner.clock.is_deaf = True  # of what passes really take
    planner.clock._step_seconds = 4 * PLAIN_SECONDS
    params = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True, detokenize=False)
    # By whether drafts mostly stand, and whether 64 tokens have come since they do or do not.
    kinds = [(stands, late) for stands in (True, False) for late in (True, False)]
    num_rounds, num_drafts = dict.fromkeys(kinds, 0.0), dict.fromkeys(kinds, 0.0)
    for request_id, first in enumerate((5, 700, 333, 1100)):
        llm.engine.add_request(str(request_id), [first], params)
        sequence = llm.engine.requests[str(request_id)].sequences[0]
        num_since, stood = 0, None
        while llm.engine.has_unfinished_requests:
            before = len(sequence.output_token_ids), metrics.steps, metrics.draft_tokens
            llm.engine.step()
            emitted = sequence.output_token_ids[before[0] :]
            for token_id in emitted:
                stands = token_id < 640
                num_since, stood = num_since + 1 if stands == stood else 0, stands
                num_rounds[stands, num_since >= 64] += (metrics.steps - before[1]) / len(emitted)
                num_drafts[stands, num_since >= 64] += (metrics.draft_tokens - before[2]) / len(emitted)
    drafts_per_round = {kind: num_drafts[kind] / num_rounds[kind] for kind in kinds}
    assert min(num_rounds.values()) > 100
    assert drafts_per_round[True, True] > 6.0, drafts_per_round  # 4.6 where no plan ends with a turn
    # Up to ten rows take as long as one: a draft that seldom stands pays.
    assert drafts_per_round[False, True] < 1.5, drafts_per_round


def test_of_two_halves_the_plan_of_the_one_whose_text_turns_ends():
    controller = Planned()
    planner, members = planner_of(controller), [Member(), Member()]
    for half, member in enumerate(members):
        planner.turn_to(half)
        planner.plan([member])
    for num_accepted in (3, 3, 3, 3, 0, 0):  # of the first half, while the second one's plan is at hand
        planner.fared(members[0], (3,) * 4, (num_accepted,) * 4)
    planner.plan([members[1]])
    assert controller.num_plans == 2
    planner.turn_to(0)
    controller.num_drafts = 1
    planner.plan([members[0]])
    assert controller.num_plans == 3
    assert planner._standing.plan.is_provisional


def test_plans_behind_a_turn_are_short_and_none_is_for_who_comes_next():
    controller = Planned()
    controller.num_steps = 32
    planner, member = planner_of(controller), Member()
    planner.plan([member])
    for num_accepted in (3, 3, 3, 3, 0, 0):
        planner.fared(member, (3,) * 4, (num_accepted,) * 4)
    controller.num_drafts = 1
    planner.plan([member])
    assert planner._standing.good_for == _SOON
    planner.forget(member)
    planner.plan([Member()])
    assert not planner._standing.plan.is_provisional


def test_what_waits_to_be_told_of_the_text_before_is_not_told_behind_its_turn():
    controller, told = Planned(), []
    controller.observe_drafts = lambda sequence, *outcome: told.append(outcome[:2])
    planner, member, other = planner_of(controller), Member(), Member()
    planner.plan([member, other])
    for num_accepted in (3, 3, 3, 3):
        planner.fared(member, (3,) * 4, (num_accepted,) * 4)
        planner.told(member, Draft([1, 2, 3]), [1, 2, 3, 4])
    planner.told(other, Draft([1, 2]), [1, 5])
    planner.fared(member, (3,) * 4, (0,) * 4)
    planner.fared(member, (3,) * 4, (0,) * 4)
    assert len(controller.outcomes) == 1
    planner.plan([member, other])
    assert told == [(1, 1)]


def test_a_controller_that_knows_neither_looks_nor_turns_hears_of_single_drafts():
    class Old:
        costs = costs(0.05)

        def __init__(self):
            self.told = []

        def plan(self, candidates, num_steps):
            return Plan([0] * len(candidates), num_steps=100)

        def observe_drafts(self, sequence, num_accepted, num_rejected, evidence=None):
            self.told.append((num_accepted, num_rejected))

    planner, member = planner_of(Old()), Member()
    for _ in range(2 * LOOKS_AGAIN):
        assert not planner.plan([member]).looks_back
    member.token_ids, member.num_tokens = [1, 2, 3], 3
    planner.look_back(member, [1, 2, 9])
    assert planner.controller.told == [(1, 0), (1, 0), (0, 1)]


def test_rows_that_are_tried_are_nobodys_drafts(toy_pair):
    """Though some of them stand, as where a text repeats its last token."""
    llm = make_llm(toy_pair, "auto")
    planner = llm.engine.speculative_step.planner
    told, fared = [], planner.fared
    planner.fared = lambda sequence, *counts: told.append(counts) or fared(sequence, *counts)
    planner.controller = Planned()
    for tries_rows in (True, False):
        plan = Plan([3], num_steps=4, is_trial=tries_rows, tries_rows=tries_rows)
        planner.controller.plan = lambda candidates, num_steps, plan=plan: plan
        generate(llm, toys.prompts(1), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        assert bool(told) != tries_rows
