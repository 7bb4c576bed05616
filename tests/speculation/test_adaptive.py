"""The controller on simulated time: near the best fixed K wherever that lies, and never slower than no drafts."""

from __future__ import annotations

import math

import pytest

from specpaged.speculation.acceptance import AcceptanceModel
from specpaged.speculation.adaptive import AdaptiveController
from specpaged.speculation.controller import GLANCE, Candidate
from specpaged.speculation.cost_model import CostModel
from specpaged.speculation.looks import Looks
from specpaged.speculation.lookups import LookupController
from specpaged.speculation.pass_seconds import PassSeconds, PassShape
from specpaged.speculation.prospects import LOOKING, Prospects
from specpaged.speculation.step_times import TimesOfSteps
from specpaged.speculation.stop_rule import StopRule
from tests.speculation.simulation import NODES, PLAIN_SECONDS, Fixed, Simulation, costs, knowing, noisy

STEPS = 600


def earn(looks: Looks, seconds: float, most: float) -> None:
    """So much credit more, up to `most`."""
    looks.share = 4.0 * seconds / most
    looks.earn(1, most / 4.0)


def simulate(draft, acceptance, num_seqs, **arguments):
    controller = (LookupController if draft is None else AdaptiveController)(costs(draft))
    return Simulation(controller, num_seqs, acceptance, draft, **arguments)


def of_fixed(k, draft, acceptance, num_seqs, **arguments):
    return Simulation(Fixed(k), num_seqs, acceptance, draft, **arguments).tokens_per_second(200)


@pytest.mark.parametrize("tells", [True, False], ids=["telling drafter", "drafter that knows nothing"])
@pytest.mark.parametrize("num_seqs", [1, 4, 16])
@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("draft", [0.05, 0.15, 0.4])
def test_it_is_near_the_best_fixed_k_and_never_slower_than_none(draft, acceptance, num_seqs, tells):
    simulation = simulate(draft, lambda i, n: acceptance, num_seqs, tells=tells)
    speed = simulation.tokens_per_second(STEPS)
    fixed = [of_fixed(k, draft, lambda i, n: acceptance, num_seqs, tells=tells) for k in (0, 1, 2, 3, 5, 8)]
    assert speed >= 0.98 * fixed[0]
    assert speed >= 0.92 * max(fixed)
    assert simulation.looking <= (LOOKING + 0.004) * simulation.seconds  # and what a new request has in advance
    assert simulation.num_verified <= simulation.num_draft_tokens


@pytest.mark.parametrize("num_seqs", [4, 8])
def test_in_a_mixed_batch_it_drafts_for_those_whose_drafts_stand(num_seqs):
    def acceptance(i, n):
        return 0.9 if i % 2 else 0.2

    simulation = simulate(0.05, acceptance, num_seqs)
    speed = simulation.tokens_per_second(STEPS)
    fixed = [of_fixed(k, 0.05, acceptance, num_seqs) for k in (0, 1, 2, 3, 5, 8)]
    assert speed >= 1.08 * max(fixed)
    assert min(simulation.num_tokens[1::2]) > 1.8 * max(simulation.num_tokens[::2])


@pytest.mark.parametrize(("before", "after"), [(0.2, 0.9), (0.9, 0.2)])
def test_a_change_in_the_middle_of_an_output_is_followed_within_64_tokens(before, after):
    change = 500
    for draft, num_seqs in ((0.05, 1), (0.05, 4), (0.15, 1), (0.15, 2), (0.15, 3)):
        simulation = simulate(draft, lambda i, n: before if n < change else after, num_seqs)
        while min(simulation.num_tokens) < change + 64:
            simulation.step()
        fixed = [of_fixed(k, draft, lambda i, n: after, num_seqs) for k in (0, 1, 2, 3, 5, 8)]
        assert simulation.tokens_per_second(200) >= 0.93 * max(fixed)


def test_a_text_that_turns_predictable_is_found_though_to_read_all_of_it_costs_too_much():
    """500 tokens take the drafter longer than four plain steps, which is the most that is saved for looks."""
    rates = []
    for may_glance in (True, False):
        simulation = simulate(0.15, lambda i, n: 0.2 if n < 500 else 0.9, 3, may_glance=may_glance)
        while min(simulation.num_tokens) < 564:
            simulation.step()
        rates.append(simulation.tokens_per_second(200))
    assert rates[0] > 2 * rates[1]


@pytest.mark.parametrize(("draft", "num_seqs"), [(0.05, 1), (0.05, 2), (0.15, 1), (0.15, 2)])
def test_texts_that_turn_again_and_again_are_followed(draft, num_seqs):
    """Rows are free up to a tile of the kernels, so that trials of them are: they must not take the place of looks."""

    def turning(i, n):
        return 0.9 if (n // 256 + i) % 2 else 0.2

    fixed = [of_fixed(k, draft, turning, num_seqs) for k in (0, 1, 2, 3, 5)]
    assert simulate(draft, turning, num_seqs).tokens_per_second(4000) >= max(fixed)


@pytest.mark.parametrize("num_left", [20, 100, 4000, None])
@pytest.mark.parametrize("num_seqs", [1, 6])
def test_what_a_plan_says_of_lags_is_what_would_be_planned(num_left, num_seqs):
    """Of one alone, and of each of several that are alike but for that."""

    def plan_of(lag):
        controller = knowing(AdaptiveController(costs(0.05)))
        others = [Candidate(i, 8, 1, 0, 500, num_left) for i in range(1, num_seqs)]
        return controller.plan([Candidate(0, 8, lag, 0, 500, num_left), *others])

    most = plan_of(1).lag_repaid
    lags = [1, 4, *(round(1.1**i) for i in range(20, 140))]
    repaid = [most.repays(lag, num_left) for lag in lags]
    assert len(set(repaid)) == 2
    is_close = [most.repays(round(0.97 * lag), num_left) != most.repays(round(1.03 * lag), num_left) for lag in lags]
    for lag, repays, close in zip(lags, repaid, is_close, strict=True):
        plan = plan_of(lag)
        assert (plan.num_draft_tokens[0] > 0) == repays or close
        if num_seqs == 1:
            assert plan.lag_repaid == most


@pytest.mark.parametrize("num_seqs", [1, 6])
def test_of_heads_no_plan_says_how_far_behind_somebody_may_be(num_seqs):
    """They have run nothing of a prompt when it is planned for, and will have, whatever is planned."""
    of_heads = costs(0.05)
    model = CostModel(of_heads.target, of_heads.draft, following=PassSeconds([1, 64], [1e-5, 1e-5]))
    plan = knowing(AdaptiveController(model)).plan([Candidate(i, 8) for i in range(num_seqs)])
    assert all(plan.num_draft_tokens)
    assert plan.lag_repaid is None


def test_who_is_too_far_behind_is_glanced_at_once_for_each_half_of_a_glance():
    looks = Looks(costs(0.15))

    def candidate(context_len, lag=1000, may_glance=True):
        return Candidate("a", 8, lag, lag - 1, context_len, may_glance=may_glance)

    earn(looks, 1.0, most=4e-3)
    assert looks.choose([candidate(1000)], [0], [0]) == ([0], [0])
    earn(looks, 1.0, most=4e-3)
    assert looks.choose([candidate(1000 + GLANCE // 2 - 1)], [0], [0]) == ([], [])
    assert looks.choose([candidate(1000 + GLANCE // 2)], [0], [0]) == ([0], [0])
    earn(looks, 1.0, most=4e-3)
    assert looks.choose([candidate(1100, lag=20)], [0], [0]) == ([0], [])  # who can read all of it does
    earn(looks, 1.0, most=4e-3)
    looks.forget("a")
    assert looks.choose([candidate(1000)], [0], [0]) == ([0], [0])


def test_of_those_of_whom_as_much_is_known_the_one_whose_glance_is_the_longest_ago_is_glanced_at():
    """Each glance takes all the credit there is; texts are of different lengths."""
    looks = Looks(costs(0.15))
    candidates = [Candidate(i, 8, 1000, 999, 5000 - 1000 * i, may_glance=True) for i in range(3)]
    of_glance = looks.costs.proposal(1) / 2 + looks.costs.draft.of_rows(GLANCE)
    looks.credit = 0.0
    glanced = []
    for _ in range(6):
        earn(looks, 1.01 * of_glance, most=1.5 * of_glance)
        glanced += looks.choose(candidates, [0] * 3, [10.0, 14.0, 12.0])[1]
        for candidate in candidates:
            candidate.context_len += GLANCE
        looks.credit = 0.0
        looks._num_in_vain = 0
    assert glanced == [0, 1, 2] * 2


def test_the_share_of_steps_between_plans_is_earned_once():
    looks = Looks(costs(0.15))
    looks.share, looks.credit = 0.01, 0.0
    looks.earn(30, 1e-3, since_plan=True)
    looks.earn(20, 1e-3, since_plan=True)
    assert looks.credit == pytest.approx(0.5e-3)
    looks.earn(64, 1e-3)  # since the plan was made
    assert looks.credit == pytest.approx(0.64e-3)
    looks.earn(10, 1e-3)
    assert looks.credit == pytest.approx(0.74e-3)


def test_what_new_requests_have_in_advance_is_earned_later_however_short_they_are():
    """Of eight tokens each, one at a time: a quarter of a plain step for each would be 3 % of the time."""
    looks = Looks(costs(0.15))
    looks.credit, looks.share, looks.most = 0.0, 0.01, 4e-3
    given = 0.0
    for _ in range(1000):
        for earn_some in (lambda: looks.advance(0.25e-3), lambda: looks.earn(8, 1e-3)):
            looks.credit = 0.0  # it is spent
            earn_some()
            given += looks.credit
    assert 0.8 * 0.01 * 8 <= given <= 0.01 * 8 + looks.most


@pytest.mark.parametrize(("drafts", "num_seqs"), [((0.15, 0.25, 0.4), (1, 1, 1)), ((0.05, 0.05, 0.05), (1, 8, 16))])
def test_the_less_certain_drafts_would_gain_the_less_time_goes_into_looking(drafts, num_seqs):
    shares = [
        AdaptiveController(costs(draft)).prospects.share_of_looking(n, 8)
        for draft, n in zip(drafts, num_seqs, strict=True)
    ]
    assert LOOKING >= shares[0] > shares[1] > shares[2] > 0.0


@pytest.mark.parametrize("way", ["plain_rounds", "drafting_rounds", "overlaps", "hides_host"])
def test_what_drafts_gain_and_what_steps_take_is_asked_anew_where_they_are_run_in_another_way(way):
    of_way, asked = costs(0.15), []
    prospects = Prospects(of_way, AcceptanceModel(), lambda chances: asked.append(of_way.way) or float(len(asked)))
    times = TimesOfSteps(of_way)
    before, others = getattr(of_way, way), []
    for value in (before, 1 + before, before):
        setattr(of_way, way, value)
        others.append((prospects.gain(4, 0.5, 3), times.of(4, 3)))
    assert len(set(asked)) == len(asked) == 2
    assert others[0] == others[2]
    assert others[1][0] != others[0][0]
    assert others[1][1] is not others[0][1]


def test_noise_switches_nothing_on_and_off():
    """Of a batch in which drafts do not pay, at no time does a slow pass make them seem to."""
    simulation = simulate(0.4, lambda i, n: 0.3, 8, noise=noisy)
    simulation.tokens_per_second(100)
    drafted = simulation.num_draft_tokens
    simulation.tokens_per_second(1000)
    assert simulation.num_draft_tokens - drafted < 100


def test_costs_that_were_probed_wrongly_are_found_out():
    """A draft that was thought to cost a twentieth, and costs two fifths."""
    simulation = simulate(0.4, lambda i, n: 0.3, 4)
    simulation.controller = AdaptiveController(costs(0.05))
    simulation.tokens_per_second(1000)
    assert simulation.tokens_per_second(500) >= 0.97 * of_fixed(0, 0.4, lambda i, n: 0.3, 4)


@pytest.mark.parametrize("num_seqs", [6, 8, 16])
def test_rows_that_were_probed_as_too_dear_are_found_out_though_nobody_drafts(num_seqs):
    """As where a host takes the weights out of the caches: a plain pass takes longer, one with more rows hardly so.

    With 16 sequences not even certain drafts would pay, if passes took that.
    """
    probed = costs(0.05)
    probed.target.seconds = [s * (1 + 0.06 * n) for n, s in zip(NODES, probed.target.seconds, strict=True)]
    simulation = simulate(0.05, lambda i, n: 0.8, num_seqs)
    simulation.controller = knowing(AdaptiveController(probed))
    simulation.tokens_per_second(600)
    assert 0 < simulation.trying <= 0.004 * simulation.seconds + 4 * PLAIN_SECONDS
    fixed = [of_fixed(k, 0.05, lambda i, n: 0.8, num_seqs) for k in (0, 1, 2, 3, 5, 8)]
    assert simulation.tokens_per_second(400) >= 0.93 * max(fixed)


def test_rows_that_are_tried_find_the_caches_as_plain_passes_do_and_not_as_behind_a_drafter():
    """A plain pass takes three tenths less than one that a drafter was before: so do these, and drafts pay no more."""
    simulation = simulate(0.05, lambda i, n: 0.5, 4)
    known = costs(0.05)
    for of in (known, simulation.truth):
        of.seconds_saved = 0.3 * PLAIN_SECONDS
        of.target.seconds = [PLAIN_SECONDS * (1 + 0.1 * (n - 1)) for n in NODES]
    simulation.controller = AdaptiveController(known)
    before = known.target.of_rows(8) / known.target_seconds(PassShape(4, 4))
    simulation.tokens_per_second(4 * STEPS)
    assert simulation.trying > 0
    assert known.target.of_rows(8) / known.target_seconds(PassShape(4, 4)) == pytest.approx(before, rel=0.02)


@pytest.mark.parametrize(("acceptance", "pays"), [(0.3, False), (0.9, True)])
def test_whether_unknown_drafts_pay_is_found_out_by_drafting(acceptance, pays):
    """Of rows that take half a plain step each: drafts such as are expected do not pay, better ones would."""
    known = costs(0.05)
    known.target.seconds = [PLAIN_SECONDS * (1 + 0.5 * (n - 1)) for n in NODES]
    simulation = simulate(0.05, lambda i, n: acceptance, 1)
    simulation.controller, simulation.truth = AdaptiveController(known), known
    speed = simulation.tokens_per_second(60)
    assert simulation.num_draft_tokens > 0
    plain = 1.0 / (PLAIN_SECONDS + known.seconds_per_step)
    assert speed > (1.1 if pays else 0.9) * plain
    drafted = simulation.num_draft_tokens
    simulation.tokens_per_second(60)
    assert (simulation.num_draft_tokens > drafted) == pays


def test_where_no_draft_could_pay_nothing_is_looked_at():
    simulation = simulate(0.9, lambda i, n: 0.99, 32)
    simulation.tokens_per_second(300)
    assert simulation.num_draft_tokens == 0
    assert simulation.looking == 0


def test_where_no_requests_drafts_would_pay_hardly_anybody_looks():
    """Where some would, as far as outcomes show, others are looked at; less often, when that has led to nothing."""
    shares = []
    for acceptances in ((0.2, 0.2), (0.9, 0.2)):
        simulation = simulate(0.05, lambda i, n, of=acceptances: of[i % 2], 12)
        simulation.tokens_per_second(4 * STEPS)
        shares.append(simulation.looking / simulation.seconds)
    assert shares[0] < 0.0006 < 0.0012 < shares[1] <= 0.6 * LOOKING


def looks_of(credit, of_draft=0.15):
    """With so many plain steps' time of credit, and a hundredth of one in each step."""
    looks = Looks(costs(of_draft))
    looks.share = 0.01
    looks.earn(1, PLAIN_SECONDS)
    looks.credit, looks._num_looks = credit * PLAIN_SECONDS, 1
    return looks


def candidate_behind(num_new, context_len=500):
    return Candidate("a", 8, 1 + num_new, num_new, context_len)


def test_it_is_said_when_there_will_be_credit_for_a_look():
    price = costs(0.15).draft.of_rows(8) + costs(0.15).proposal(1) / 2
    steps = math.ceil(price / (0.01 * PLAIN_SECONDS))
    looks = looks_of(0.0)
    assert looks.choose([candidate_behind(8)], [0], [0]) == ([], [])
    assert looks.due == steps == 18
    looks.earn(steps, PLAIN_SECONDS)
    assert looks.choose([candidate_behind(8)], [0], [0]) == ([0], [])
    assert looks.due in (steps - 1, steps), "as long again, for the next one, but for what is left"


def test_nobody_waits_for_credit_that_is_never_earned():
    looks = looks_of(0.0)
    looks.share = 0.0
    looks.earn(1, PLAIN_SECONDS)
    assert looks.choose([candidate_behind(8)], [0], [0]) == ([], [])
    assert looks.due == 64


def test_who_has_just_stopped_is_not_looked_at_at_once_though_there_is_credit():
    """A look takes what is earned in 43 steps. As long as up to ten rows take, it is a fifth of that that goes by."""
    looks = looks_of(1.0, of_draft=0.4)
    assert looks.choose([candidate_behind(5)], [0], [8.0]) == ([], [])
    assert looks.due == 4
    assert looks.choose([candidate_behind(9)], [0], [8.0]) == ([0], [])
    assert looks_of(1.0, of_draft=0.4).choose([candidate_behind(5)], [0], [0.0]) == ([0], []), "of it nothing is known"


def test_who_looks_in_vain_gets_weary_until_somebody_drafts():
    looks = Looks(costs(0.05))
    candidates = [Candidate(i, 8, lag=17, num_unseen=16) for i in range(2)]

    def earned():
        before = looks.credit
        earn(looks, 1.0, most=100.0)
        return looks.credit - before

    for num_looks in range(0, 24, 2):
        assert earned() == pytest.approx(1.0 if num_looks < 12 else 0.6)
        assert looks.choose(candidates, [0, 0], [0, 0]) == ([0, 1], [])
    looks.choose(candidates, [3, 0], [0, 0])
    assert earned() == pytest.approx(1.0)


@pytest.mark.parametrize(("num_left", "drafts"), [(8, False), (100, False), (200, False), (256, True), (None, True)])
def test_who_comes_catches_up_if_its_own_tokens_repay_that_whatever_the_others_gain(num_left, drafts):
    """With drafts that stand at 0.6, a token of eight sequences gains 15 us, half of which is what drafts must gain to
    be begun; 300 tokens take the drafter 0.9 ms.

    Of the tokens that may come, half are counted on.
    """
    controller = knowing(AdaptiveController(costs(0.05)))
    running = [Candidate(i, 8, num_left=100) for i in range(7)]
    newcomer = Candidate(7, 8, lag=300, num_left=num_left)
    counts = controller.plan([*running, newcomer], 1).num_draft_tokens
    assert all(counts[:7])
    assert bool(counts[7]) == drafts


@pytest.mark.parametrize(("used", "drafts"), [(1.0, True), (0.25, False)])
def test_who_comes_is_thought_to_put_out_as_much_as_others_did_before(used, drafts):
    """Of 120 tokens that may come; as above, some 60 repay what catching up takes."""
    controller = knowing(AdaptiveController(costs(0.05)))
    for _ in range(40):
        controller.observe_end(round(used * 30), 30)
    running = [Candidate(i, 8, num_left=100) for i in range(7)]
    counts = controller.plan([*running, Candidate(7, 8, lag=300, num_left=120)], 1).num_draft_tokens
    assert all(counts[:7])
    assert bool(counts[7]) == drafts


@pytest.mark.parametrize(("num_left", "drafts"), [(100, True), (2, False)])
def test_of_those_who_come_one_after_another_the_first_ones_are_decided_for_and_each_weighs_its_own_prompt(
    num_left, drafts
):
    controller = knowing(AdaptiveController(costs(0.05)))
    decided, decide = [], controller._decide
    controller._decide = lambda candidates, logits: decided.append(candidates[0].lag) or decide(candidates, logits)
    for i in range(4):
        [count] = controller.plan([Candidate(i, 8, lag=300, num_left=100)], 1).num_draft_tokens
        assert count
        controller.forget(i)
    assert decided == [1, 1]  # to begin, and to go on
    [count] = controller.plan([Candidate(4, 8, lag=300, num_left=num_left)], 1).num_draft_tokens
    assert bool(count) == drafts


def test_of_long_prompts_one_is_looked_at_on_debt_at_first_and_when_all_credit_has_been_saved():
    """A look takes 9 ms; at most 4 ms are saved, and 1 ms is there in advance."""
    looks = Looks(costs(0.15))
    candidates = [Candidate(i, 8, lag=1000, num_unseen=20) for i in range(3)]
    looked = []
    for _ in range(2000):
        earn(looks, 1e-5, most=4e-3)
        looked.append(looks.choose(candidates, [0] * 3, [0] * 3)[0])
    assert [len(chosen) for chosen in looked if chosen] == [1, 1]
    assert looked[0]
    assert looks.credit == pytest.approx(1e-3 + 2000 * 1e-5 - 2 * 9e-3, abs=5e-4)
    too_long = [Candidate(0, 8, lag=2000, num_unseen=20)]
    assert Looks(looks.costs).choose(too_long, [0], [0]) == ([], [])


def test_what_nobody_looked_for_is_not_spent_at_once_later():
    looks = Looks(costs(0.15))
    for _ in range(1000):
        earn(looks, 1.0, most=1e-3)
    assert looks.credit == 1e-3
    chosen, _ = looks.choose([Candidate(i, 8, lag=17, num_unseen=16) for i in range(200)], [0] * 200, [0] * 200)
    assert chosen == list(range(len(chosen))) != []
    spent = looks.costs.proposal(1) / 2 + looks.costs.draft.of_rows(16 * len(chosen))
    assert looks.credit == pytest.approx(1e-3 - spent)


@pytest.mark.parametrize("acceptance", [0.05, 0.9])
def test_prompt_lookup_under_rejection_verifies_what_past_outcomes_say(acceptance):
    """All is proposed, as it costs nothing; how much is verified was known before."""
    controller = LookupController(costs(None), by_evidence=False)
    simulation = Simulation(controller, 16, lambda i, n: acceptance, None)
    speed = simulation.tokens_per_second(STEPS)
    assert simulation.num_draft_tokens == 8 * 16 * STEPS
    assert speed >= 0.95 * of_fixed(0, None, lambda i, n: acceptance, 16)
    assert (simulation.num_verified < 0.05 * simulation.num_draft_tokens) == (acceptance < 0.5)


def test_prompt_lookup_verifies_what_its_evidence_says():
    """Proposals cost nothing: all are made, and those are verified that are likely enough."""
    simulation = simulate(None, lambda i, n: 0.9 if i == 0 else 0.1, 16)
    speed = simulation.tokens_per_second(STEPS)
    assert speed >= 1.0 * of_fixed(0, None, lambda i, n: 0.1, 16)
    assert simulation.num_verified < 0.3 * simulation.num_draft_tokens
    assert simulation.num_tokens[0] > 1.3 * simulation.num_tokens[1]


@pytest.mark.parametrize("by_evidence", [True, False])
@pytest.mark.parametrize("num_seqs", [1, 8])
def test_a_drafter_without_a_model_that_takes_long_and_is_seldom_right_is_hardly_asked(num_seqs, by_evidence):
    """A proposal takes 0.4 of a plain step, at first unknown; from some token on its drafts stand."""
    change = 1500
    controller = LookupController(costs(None), by_evidence)
    controller.costs.seconds_per_proposal = 0.01 * PLAIN_SECONDS

    def simulated(controller):
        simulation = Simulation(controller, num_seqs, lambda i, n: 0.1 if n < change else 0.9, None)
        simulation.truth.seconds_per_proposal = 0.4 * PLAIN_SECONDS
        return simulation

    simulation, plain = simulated(controller), simulated(Fixed(0))
    assert simulation.tokens_per_second(1000) >= 0.97 * plain.tokens_per_second(100)
    assert simulation.tokens_per_second(300) >= 0.98 * plain.tokens_per_second(100)
    while min(simulation.num_tokens) < change + (250 if by_evidence else 1000):
        simulation.step()
    fixed = simulated(Fixed(8))
    fixed.num_tokens = [change] * num_seqs
    assert simulation.tokens_per_second(200) >= 0.9 * fixed.tokens_per_second(200)


@pytest.mark.parametrize(("finds", "price", "asked"), [(0.1, 0.0, True), (0.1, 0.05, True), (0.02, 0.4, False)])
def test_what_is_seldom_found_and_stands_is_looked_for_if_that_takes_little(finds, price, asked):
    simulation = simulate(None, lambda i, n: 0.9, 1, finds=finds)
    simulation.truth.seconds_per_proposal = price * PLAIN_SECONDS
    simulation.controller.costs.seconds_per_proposal = 0.01 * PLAIN_SECONDS  # it is more, mostly
    speed = simulation.tokens_per_second(4 * STEPS)
    plain = Simulation(Fixed(0), 1, lambda i, n: 0.9, None).tokens_per_second(100)
    assert speed >= (1.2 if asked else 0.96) * plain
    assert simulation.num_steps == 4 * STEPS


def test_a_lookup_that_takes_next_to_nothing_is_asked_in_every_step_and_a_drafter_that_finds_nothing_is_not():
    for seconds, nothing, asked in ((0.0, False, 1.0), (0.01, False, 1.0), (0.4, True, 0.1)):
        simulation = simulate(None, lambda i, n: 0.3, 4, most=0 if nothing else 8)
        simulation.controller.costs.seconds_per_proposal = seconds * PLAIN_SECONDS
        controller, plans = simulation.controller, []
        for _ in range(400):
            plans.append(controller.plan([Candidate(i, 8) for i in range(4)], 1))
            if any(plans[-1].num_draft_tokens) and not plans[-1].tries_rows:
                controller.observe_proposed(4, not nothing)
                if not nothing and controller.selects():
                    controller.select(range(4), [[3.0]] * 4)
        later = [any(plan.num_draft_tokens) and not plan.tries_rows for plan in plans[100:]]
        share = sum(later) / len(later)
        assert share == 1.0 if asked == 1.0 else 0.0 < share < asked


@pytest.mark.parametrize("draft", [None, 0.05])
@pytest.mark.parametrize("num_seqs", [1, 4, 16])
def test_where_a_rule_selects_in_the_controllers_place_it_is_about_as_good(draft, num_seqs):
    def acceptance(i, n):
        return (0.9, 0.2, 0.5)[i % 3]

    asked, by_rule = (
        simulate(draft, acceptance, num_seqs, num_rounds=num_rounds).tokens_per_second(4 * STEPS)
        for num_rounds in (1, 4)
    )
    assert by_rule >= 0.96 * asked


@pytest.mark.parametrize(("draft", "acceptance"), [(0.05, 0.3), (0.15, 0.6)])
def test_a_rule_knows_that_rows_beyond_those_that_the_weights_hide_cost_more(draft, acceptance):
    """Of four sequences, two drafts each are hidden, nearly; evidence may ask for more."""
    speed = simulate(draft, lambda i, n: acceptance, 4, num_rounds=4).tokens_per_second(3 * STEPS)
    assert speed >= 0.97 * max(of_fixed(k, draft, lambda i, n: acceptance, 4) for k in (1, 2, 3))


def test_a_rule_keeps_the_drafts_that_are_worth_their_rows():
    """Of logits 2 and 0 there is a chance of 0.88, and of 0.88 / 2 of both; of a row of less hope, of 0.73 and 0.20."""
    rule = StopRule(1.0, [0.0], [0.0, -1.0], [0.5, 0.5], row_tokens=0.4, pass_tokens=0.0)
    assert rule.num_worth([2.0, 0.0, 6.0], 0) == 3
    assert rule.num_worth([2.0, 0.0, 6.0], 1) == 1
    assert rule.num_worth([2.0, math.nan, 6.0], 0) == 1
    assert rule.num_worth([-2.0, 6.0], 0) == 0
    alone = rule.of_rows([1])
    assert alone.num_worth([2.0, 0.0, 6.0], 0) == 1
    assert (len(alone.leads), len(alone.expected)) == (1, 1)


def test_without_evidence_counts_depend_on_what_was_verified_before_alone():
    """As rejection sampling asks: what has just been drawn decides nothing."""
    controller = AdaptiveController(costs(0.05), by_evidence=False)
    candidates = [Candidate(i, 8) for i in range(2)]
    plan = controller.plan(candidates)
    assert plan.stop_rule is None
    assert not controller.selects()
    for evidence in ([[-5.0] * 3, [5.0] * 2], [[5.0] * 3, [-5.0] * 2]):
        assert controller.select([c.sequence for c in candidates], evidence) == [3, 2]


@pytest.mark.parametrize(
    ("apart", "num_seen", "num_others", "soon"),
    [(2.0, 0, 3, True), (2.0, 8, 3, False), (0.5, 0, 3, False), (2.0, 0, 4, False)],
)
def test_where_requests_differ_and_some_draft_that_are_not_known_it_is_decided_anew_soon(
    apart, num_seen, num_others, soon
):
    controller = knowing(AdaptiveController(costs(0.05)))
    controller.acceptance.share, controller.acceptance.lead_variance = 1.0, apart**2
    for i in range(num_others):
        controller.observe_drafts(i, 8, 0)
    controller.observe_drafts("new", num_seen, 0)
    for _ in range(3):  # the third one would last longest
        plan = controller.plan([Candidate(i, 8) for i in (*range(num_others), "new")])
    assert all(plan.num_draft_tokens)
    assert plan.is_provisional == soon
    assert (plan.num_steps <= 4) == soon
    plan = controller.plan([Candidate(i, 8) for i in (*range(num_others), "new")])
    assert not plan.is_provisional, "nothing came of its drafts: somebody else's may be taken"


@pytest.mark.parametrize(
    ("num_seqs", "stops", "is_selected_from"), [(1, True, False), (2, True, True), (1, False, True)]
)
def test_one_alone_whose_drafts_a_rule_has_stopped_is_not_selected_from_once_more(num_seqs, stops, is_selected_from):
    controller = AdaptiveController(costs(0.05), stops=stops)
    Simulation(controller, num_seqs, lambda i, n: 0.6, 0.05).tokens_per_second(STEPS)
    controller.selecting.gain = 0.1  # it pays, as far as anybody knows
    plan = controller.plan([Candidate(i, 8) for i in range(num_seqs)])
    assert any(plan.num_draft_tokens)
    assert (plan.stop_rule is not None) == stops
    assert controller.selects() == is_selected_from


def test_drafts_are_selected_from_now_and_then_where_that_gains_nothing():
    """Of one sequence the next rows cost next to nothing; of ten, whose drafts differ, they do."""
    for num_seqs, seldom in ((1, True), (10, False)):
        controller = Counting(AdaptiveController(costs(0.05), stops=False))
        Simulation(controller, num_seqs, lambda i, n: 0.6, 0.05).tokens_per_second(STEPS)
        assert (controller.num_selected < 0.3 * STEPS) == seldom


class Counting:
    """A controller whose selections are counted."""

    def __init__(self, controller):
        self.controller, self.num_selected = controller, 0

    def select(self, *arguments):
        self.num_selected += 1
        return self.controller.select(*arguments)

    def __getattr__(self, name):
        return getattr(self.controller, name)


@pytest.mark.parametrize("dearer", [0.7, 1.0, 1.4])
def test_passes_with_drafts_that_were_probed_too_dear_or_too_cheap_are_found_out(dearer):
    """As where memory has become quicker or slower than it was."""
    controller = AdaptiveController(costs(0.15))
    simulation = Simulation(controller, 8, lambda i, n: 0.7, 0.15)
    f = simulation.truth.target
    f.seconds = [s * (dearer if n > 8 else 1.0) for n, s in zip(f.num_rows, f.seconds, strict=True)]
    simulation.tokens_per_second(STEPS)
    speed = simulation.tokens_per_second(STEPS)
    plain = Simulation(Fixed(0), 8, lambda i, n: 0.7, 0.15).tokens_per_second(200)
    fixed = [Simulation(Fixed(k), 8, lambda i, n: 0.7, 0.15) for k in (1, 2, 3, 5)]
    for other in fixed:
        other.truth.target.seconds = list(f.seconds)
    assert speed >= 0.98 * plain
    if dearer >= 1.0:  # who has never drafted does not know better
        assert speed >= 0.95 * max(other.tokens_per_second(200) for other in fixed)


def test_who_ends_is_forgotten():
    controller = AdaptiveController(costs(0.05))
    controller.plan([Candidate(i, 8) for i in range(5)])
    for i in range(5):
        controller.forget(i)
    assert controller.num_requests == 0


def test_as_many_as_a_sequence_may_have_and_no_more():
    controller = AdaptiveController(costs(0.01))
    for _ in range(200):
        controller.observe_drafts(0, 8, 0, [3.0] * 8)
    plan = controller.plan([Candidate(0, 3), Candidate(1, 0), Candidate(0, 8)])
    assert plan.num_draft_tokens[0] <= 3
    assert plan.num_draft_tokens[1] == 0
    assert plan.num_draft_tokens[2] > 3


def test_kv_that_is_read_counts():
    """A long context makes rows dear: fewer are verified."""
    target = PassSeconds([1, 64], [1e-3, 1.05e-3], per_row_and_kv_token=1e-7)
    draft = PassSeconds([1, 64], [1e-5, 2e-5])
    short, long = (
        AdaptiveController(CostModel(target, draft, 1e-6, 1e-6))
        .plan([Candidate(i, 8, context_len=context_len) for i in range(8)])
        .num_draft_tokens
        for context_len in (10, 100_000)
    )
    assert sum(long) < sum(short)


@pytest.mark.parametrize("dearer", [1.6, 3.0])
def test_plain_passes_taken_for_dearer_than_they_are_are_found_out_while_everybody_drafts(dearer):
    """By so much that it is beyond doubt, at 3: then none are tried seldom, and that is enough."""
    simulation = simulate(0.15, lambda i, n: 0.4, 16)
    believed = simulation.controller.costs.target
    believed.seconds = [
        seconds * (dearer if num_rows <= 16 else 1.0)
        for num_rows, seconds in zip(believed.num_rows, believed.seconds, strict=True)
    ]
    simulation.tokens_per_second(STEPS // 2)
    assert simulation.tokens_per_second(STEPS // 2) >= 0.98 * of_fixed(0, 0.15, lambda i, n: 0.4, 16)


@pytest.mark.parametrize("tells", [True, False])
def test_further_rows_taken_for_dearer_than_they_are_are_found_out_while_fewer_drafts_pay(tells):
    """Of 48 rows passes were probed as they are, so that one draft for every second sequence seems best."""
    num_rows = [1, 16, 32, 48, 64, 128, 512]
    truth, believed = (
        PassSeconds(num_rows, [PLAIN_SECONDS * (1 + 0.02 * n) * (1 if n <= 48 else dearer) for n in num_rows])
        for dearer in (1.0, 1.3)
    )

    def simulated(controller):
        simulation = Simulation(controller, 32, lambda i, n: 0.8, 0.05, tells=tells)
        simulation.truth.target = truth
        return simulation

    probed = CostModel(believed, costs(0.05).draft, 5e-5, 1e-4)
    simulation = simulated(knowing(AdaptiveController(probed, stops=False)))
    while simulation.plan.is_trial or not any(simulation.plan.num_draft_tokens):
        simulation.step()
    assert sum(simulation.plan.num_draft_tokens) in (15, 16, 17)
    simulation.tokens_per_second(1200)
    fixed = [simulated(Fixed(k)).tokens_per_second(200) for k in (0, 1, 2, 3, 5)]
    assert simulation.tokens_per_second(400) >= 0.95 * max(fixed)
