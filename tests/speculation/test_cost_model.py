"""The cost model: it finds what passes take under noise, and a slow machine changes none of its comparisons."""

from __future__ import annotations

import json
import math
import random

import pytest

from specpaged.speculation.cold_pass import ColdPass
from specpaged.speculation.cost_model import _FURTHER_ROUND, CostModel
from specpaged.speculation.draft_passes import DraftPasses
from specpaged.speculation.pass_seconds import PassSeconds, PassShape
from specpaged.speculation.step_times import StepTimes

NODES = [1, 2, 4, 8, 16, 32, 64]


def known(scale=1.0):
    """A pass that is bound by bytes up to some ten rows, and by arithmetic from there on."""
    return [scale * max(1.0, 0.4 + 0.06 * n) for n in NODES]


def test_between_nodes_it_is_linear_and_the_last_two_go_on():
    passes = PassSeconds([1, 3, 5], [2.0, 4.0, 8.0], per_sequence=0.25, per_kv_token=0.5, per_row_and_kv_token=0.125)
    assert [passes.of_rows(n) for n in (1, 2, 3, 4, 5, 7)] == [2, 3, 4, 6, 8, 12]
    assert passes.of(PassShape(4, 2, 10)) == 6 + 2 * 0.25 + 10 * (2 * 0.5 + 4 * 0.125)
    assert passes.of(PassShape(0, 0, 10)) == 0
    assert passes.table(7)[:6] == [0, 2, 3, 4, 6, 8]


@pytest.mark.parametrize(
    ("num_rows", "seconds", "message"),
    [
        ([1], [1.0], "two or more alike"),
        ([1, 2], [1.0], "two or more alike"),
        ([2, 1], [1.0, 1.0], "must ascend"),
        ([0, 1], [1.0, 1.0], "must ascend"),
        ([1, 2], [1.0, 0.0], "must be positive"),
    ],
)
def test_what_is_no_table_is_refused(num_rows, seconds, message):
    with pytest.raises(ValueError, match=message):
        PassSeconds(num_rows, seconds)


def test_plain_passes_take_less_where_no_drafter_has_run_between_them():
    """A pass of ten rows hardly does, as it computes longer than it reads; what is saved is no surprise."""
    model = CostModel(PassSeconds([1, 10], [1.0, 2.0]), PassSeconds([1, 2], [0.1, 0.2]), seconds_saved=0.3)
    assert [model.target_seconds(PassShape(n, n)) for n in (1, 10)] == pytest.approx([0.7, 1.85])
    assert [model.target_seconds(PassShape(n, 1)) for n in (2, 10)] == pytest.approx([10 / 9, 2.0])
    times = StepTimes.of(model, 1, 9, 0.0)
    assert (times.plain, times.verify[9]) == pytest.approx((0.7, 2.0))
    for _ in range(100):
        model.observe_target(PassShape(1, 1), 0.7)
    assert model.errors.drift == pytest.approx(0.0)
    assert model.target.seconds == pytest.approx([1.0, 2.0])


def test_it_recovers_known_costs_from_noisy_passes():
    """Probed wrongly by up to a half; noise of 5 %, one pass in ten three times as slow."""
    rng = random.Random(1)
    model = CostModel(
        PassSeconds(NODES, [s * rng.uniform(0.7, 1.5) for s in known()]),
        PassSeconds(NODES, [s * rng.uniform(0.7, 1.5) for s in known(0.1)]),
        seconds_per_proposal=0.02,
        seconds_per_step=0.05,
    )
    truth = {"target": PassSeconds(NODES, known()), "draft": PassSeconds(NODES, known(0.1))}

    def noise():
        return (3.0 if rng.random() < 0.1 else 1.0) * math.exp(rng.gauss(0, 0.05))

    for _ in range(20_000):
        n, depth = rng.choice([1, 2, 3, 6, 8, 12, 24, 48, 64]), rng.choice([1, 2, 5])
        model.observe_target(PassShape(n, n), truth["target"].of_rows(n) * noise())
        model.observe_proposal([PassShape(n, n)] * depth, (0.05 + depth * truth["draft"].of_rows(n)) * noise())
        model.observe_rest(0.1 * noise())
    unit = model.target.of_rows(1)
    for n in (1, 3, 8, 24, 64):
        assert model.target.of_rows(n) / unit == pytest.approx(truth["target"].of_rows(n), rel=0.08)
        for depth in (1, 5):
            proposal = model.seconds_per_proposal + depth * model.draft.of_rows(n)
            assert proposal / unit == pytest.approx(0.05 + depth * truth["draft"].of_rows(n), rel=0.08)
    assert model.seconds_per_step / unit == pytest.approx(0.1, rel=0.1)


def test_a_neighbour_who_slows_everything_down_changes_no_comparison():
    rng = random.Random(2)
    model = CostModel(PassSeconds(NODES, known()), PassSeconds(NODES, known(0.1)), 0.01, 0.05)
    target, proposal = model.target.of_rows(6), 0.01 + 3 * model.draft.of_rows(1)

    def compared():
        costs = [*map(model.target.of_rows, NODES), *map(model.draft.of_rows, NODES), model.seconds_per_step]
        return [cost / costs[0] for cost in costs]

    before = compared()
    for i in range(3000):
        busy = 5.0 if i // 500 % 2 else 1.0
        model.observe_target(PassShape(6, 6), busy * target * math.exp(rng.gauss(0, 0.05)))
        model.observe_proposal([PassShape(1, 1)] * 3, busy * proposal * math.exp(rng.gauss(0, 0.05)))
        model.observe_rest(busy * 0.05 * math.exp(rng.gauss(0, 0.05)))
        assert max(abs(math.log(now / then)) for now, then in zip(compared(), before, strict=True)) < 0.12


def test_long_waits_are_no_part_of_a_step():
    model = CostModel(PassSeconds(NODES, known()), seconds_per_step=0.05)
    for i in range(200):
        model.observe_target(PassShape(1, 1), known()[0])
        model.observe_rest(30.0 if i % 2 else 0.05)
    assert model.seconds_per_step == pytest.approx(0.05, rel=0.1)


def test_what_is_so_in_every_step_is_no_wait():
    model = CostModel(PassSeconds(NODES, known()), seconds_per_step=0.05)
    for _ in range(200):
        model.observe_target(PassShape(1, 1), known()[0])
        model.observe_rest(1.0)
    assert model.seconds_per_step == pytest.approx(1.0, rel=0.1)


def test_a_pass_takes_time_whatever_was_thought_to_be_saved():
    """Learned costs of one row may fall below that."""
    model = CostModel(PassSeconds([1, 8], [0.1, 0.2]), seconds_saved=0.5)
    assert model.target_seconds(PassShape(1, 1)) > 0
    assert StepTimes.of(model, 1, 4, 0.0).plain > 0


def test_a_report_of_costs_says_what_sequences_and_kv_take():
    passes = PassSeconds([1, 8], [1e-3, 2e-3], per_sequence=1e-5, per_kv_token=2e-7)
    assert str(passes) == "1 2 5.43 19.1 ms, 0.01 more a sequence, 0.2 more for 1,000 tokens of KV"
    assert str(PassSeconds([1, 8], [1e-3, 2e-3])) == "1 2 5.43 19.1 ms"


@pytest.mark.parametrize("waits", [False, True])
def test_what_a_step_takes_more_when_it_drafts_is_on_the_proposals_account(waits):
    """Of 8 sequences a plain step takes 0.09 beside its pass; one that drafts 0.15, and 0.3 in proposing."""
    model = CostModel(
        PassSeconds(NODES, known()),
        PassSeconds([1, 64], [0.05, 0.05]),
        seconds_per_proposal=0.05,
        seconds_per_step=0.01,
        seconds_per_drafting=0.01,
        seconds_per_sequence=0.01,
    )
    for i in range(400):
        model.observe_target(PassShape(8, 8), model.target.of_rows(8))
        model.observe_rest(0.09, 8)
        wait = 5.0 if waits and i % 3 == 0 else 0.0  # for a request, between two steps
        model.observe_proposal([PassShape(8, 8)] * 2, 0.3, 8, 0.15 + wait)
    assert model.rest(8) == pytest.approx(0.09, rel=0.05)
    assert model.proposal(8) + 2 * model.draft.of_rows(8) == pytest.approx(0.36, rel=0.1)
    assert model.proposal(16) > 1.2 * model.proposal(8)


def test_what_a_call_takes_beside_its_rounds_is_not_taken_for_what_each_round_would():
    """A call of four rounds takes 0.35 beside them; one of a single round would take 0.2."""
    model = CostModel(PassSeconds(NODES, known()), seconds_per_step=0.1)
    for _ in range(200):
        model.observe_target(PassShape(4, 4), model.target.of_rows(4))
        model.observe_rest(0.35, 4, 4)
    assert model.rest(4, 4) == pytest.approx(0.35, rel=0.05)
    assert model.rest(4) == pytest.approx(0.35 / (1 + 3 * _FURTHER_ROUND), rel=0.05)


def test_what_is_there_once_in_a_call_is_not_there_in_each_of_many_rounds():
    """A call of 2 to 16 rounds takes 0.5 once, and 0.02 for each."""
    model = CostModel(PassSeconds(NODES, known()), seconds_per_step=0.07, seconds_per_sequence=0.02)
    for num_rounds in (2, 16, 4, 6, 16, 12) * 20:
        model.observe_target(PassShape(16, 1), model.target.of_rows(16))
        model.observe_rest(0.5 + 0.02 * num_rounds, 1, num_rounds)
    for num_rounds in (4, 6, 16):
        assert model.rest(1, num_rounds) == pytest.approx(0.5 + 0.02 * num_rounds, rel=0.25)


@pytest.mark.parametrize(("per_step", "per_sequence"), [(0.45, 0.02), (0.02, 0.06)])
def test_what_a_host_takes_for_many_is_not_concluded_from_what_it_takes_for_one(per_step, per_sequence):
    """Nor the other way round: hosts differ in which part is the larger one."""
    model = CostModel(PassSeconds(NODES, known()), seconds_per_step=0.07, seconds_per_sequence=0.02)
    for num_seqs in (1, 16) * 4:
        for _ in range(100):
            model.observe_target(PassShape(16, num_seqs), model.target.of_rows(16))
            model.observe_rest(per_step + num_seqs * per_sequence, num_seqs)
    for num_seqs in (1, 4, 16):
        assert model.rest(num_seqs) == pytest.approx(per_step + num_seqs * per_sequence, rel=0.25)


def test_what_a_host_takes_for_some_says_nothing_of_others_that_are_known():
    """By turns, of a host whose own work is no straight line; of 8 sequences plain steps are heard once alone."""
    model = CostModel(PassSeconds(NODES, known()), seconds_per_step=0.1, seconds_per_sequence=0.02)
    rests = {1: 0.4, 8: 1.1, 32: 0.6}
    for turn in range(6):
        for num_seqs, seconds in rests.items():
            for _ in range(40):
                model.observe_target(PassShape(16, num_seqs), model.target.of_rows(16))
                if num_seqs == 8 and turn:
                    model.observe_proposal([], 1e-4, 8, 1.25 * seconds)
                else:
                    model.observe_rest(seconds, num_seqs)
        assert turn == 0 or [model.rest(n) for n in rests] == pytest.approx(list(rests.values()), rel=0.05)
    assert model.drafting_rest(8) == pytest.approx(1.25, rel=0.05)


def test_where_it_is_not_known_drafting_takes_a_host_no_more_than_elsewhere():
    """Of one sequence a step that drafts takes 0.1 s more; of 8 nothing is known, and of 32 it takes 0.2 s more."""
    model = CostModel(PassSeconds(NODES, known()), seconds_per_step=0.1, seconds_per_sequence=0.02)
    assert model.drafting_rest(8) == 1.0
    for _ in range(40):
        model.observe_target(PassShape(16, 1), model.target.of_rows(16))
        model.observe_rest(0.12, 1)
        model.observe_proposal([], 1e-4, 1, 0.22)
    assert model.rest(8) * (model.drafting_rest(8) - 1.0) == pytest.approx(0.1, rel=0.1)
    for _ in range(40):
        model.observe_target(PassShape(16, 32), model.target.of_rows(16))
        model.observe_rest(0.74, 32)
        model.observe_proposal([], 1e-4, 32, 0.94)
    more = {n: model.rest(n) * (model.drafting_rest(n) - 1.0) for n in (1, 2, 16, 32)}
    assert more == pytest.approx({1: 0.1, 2: 0.1, 16: 0.1, 32: 0.2}, rel=0.1), "who drafts finds out"


def test_steps_of_a_batch_are_priced_by_its_own_octave():
    """Of one sequence a step that drafts takes twice the rest; of 32 it takes no more than others."""
    model = CostModel(
        PassSeconds(NODES, known()),
        PassSeconds([1, 64], [0.05, 0.05]),
        seconds_per_proposal=0.01,
        seconds_per_step=0.1,
        seconds_per_drafting=0.001,
    )
    for _ in range(3):
        for num_seqs, plain, drafting in ((1, 0.1, 0.2), (32, 0.4, 0.4)):
            for _ in range(40):
                model.observe_target(PassShape(16, num_seqs), model.target.of_rows(16))
                model.observe_rest(plain, num_seqs)
                model.observe_proposal([], 1e-4, num_seqs, drafting)
    assert model.proposal_of_round(1) == pytest.approx(0.11, rel=0.1)
    assert model.proposal_of_round(32) == pytest.approx(0.01, abs=0.02)
    first = StepTimes.of(model, 32, 32, 0.0).first
    assert first[32] - model.draft.of_rows(40) == pytest.approx(32 * 0.001)


def test_what_all_known_octaves_show_is_not_taken_for_as_many_surprises_of_the_others():
    model = CostModel(PassSeconds(NODES, known()), seconds_per_step=0.1)
    for seconds in (0.1, 0.2):
        for num_seqs in (1, 2, 4, 8, 16):
            for _ in range(40):
                model.observe_target(PassShape(16, num_seqs), model.target.of_rows(16))
                model.observe_rest(seconds, num_seqs)
    assert [model.rest(n) for n in (1, 4, 16)] == pytest.approx([0.2] * 3, rel=0.05)
    assert model.rest(64) < 0.5


def test_what_only_steps_that_draft_have_shown_is_known_as_well():
    """Of 8 sequences, which always draft, what they take stays when it is heard what one takes, plain."""
    model = CostModel(PassSeconds(NODES, known()), seconds_per_step=0.1, seconds_per_sequence=0.02)
    for _ in range(3):
        for _ in range(40):
            model.observe_target(PassShape(16, 8), model.target.of_rows(16))
            model.observe_proposal([], 1e-4, 8, 1.1)
        for _ in range(40):
            model.observe_target(PassShape(16, 1), model.target.of_rows(16))
            model.observe_rest(0.2, 1)
        assert (model.rest(8), model.rest(1)) == pytest.approx((1.1, 0.2), rel=0.05)


def test_what_only_steps_that_draft_have_shown_of_so_many_sequences_is_not_held_against_drafting():
    """Of a batch of 16 plain steps are known; of one sequence there are none, and more than was thought is common."""
    model = CostModel(PassSeconds(NODES, known()), seconds_per_step=0.07, seconds_per_sequence=0.02)
    for _ in range(100):
        model.observe_target(PassShape(16, 16), model.target.of_rows(16))
        model.observe_rest(0.5, 16)
    for _ in range(100):
        model.observe_target(PassShape(5, 1), model.target.of_rows(5))
        model.observe_proposal([], 1e-4, 1, 0.4)
    assert model.rest(1) == pytest.approx(0.4, rel=0.05)
    assert model.proposal(1) == 0


@pytest.mark.parametrize("thought", [0.1, 0.5])  # wrong for both, and right for steps that draft
def test_a_plain_steps_rest_is_in_doubt_while_only_steps_that_draft_were_heard_and_a_few_plain_ones_settle_it(thought):
    model = CostModel(PassSeconds(NODES, known()), seconds_per_step=thought)

    def hear(num_drafting, num_plain, drafting_rest=0.5):
        for i in range(max(num_drafting, num_plain)):
            model.observe_target(PassShape(16, 1), model.target.of_rows(16))
            if i < num_drafting:
                model.observe_proposal([], 1e-4, 1, drafting_rest)
            if i < num_plain:
                model.observe_rest(0.2, 1)

    assert model.rest_doubt(1) == 0, "nothing was heard, and what was probed is known of both"
    hear(40, 0)
    assert model.rest(1) == pytest.approx(0.5, rel=0.05)
    assert model.rest_doubt(1) > 0.2
    assert model.rest_doubt(8) == 0
    times = StepTimes.of(model, 1, 2, 0.0)
    assert times.rest_doubt == pytest.approx(model.rest_doubt(1) * model.rest(1) / times.plain)
    assert times.doubt > times.rest_doubt
    model.following = model.target  # of heads, which follow in plain steps, too
    assert StepTimes.of(model, 1, 2, 0.0).rest_doubt == 0
    model.following = None
    hear(0, 4)
    hear(40, 0, 0.9)
    hear(0, 4)
    assert model.rest_doubt(1) > 0.2, "of what was heard before they took longer, nothing is left"
    hear(40, 0)
    hear(0, 5)
    assert (model.rest(1), model.rest(1) * model.drafting_rest(1)) == pytest.approx((0.2, 0.5), rel=0.05)
    assert model.rest_doubt(1) == StepTimes.of(model, 1, 2, 0.0).rest_doubt == 0


def test_a_proposal_is_spread_over_rounds_whose_drafts_are_made_within_them():
    """What falls to each proposal, and to each of its two sequences, which is part of their first draft."""
    draft = PassSeconds([1, 64], [0.05, 0.05])
    model = CostModel(PassSeconds(NODES, known()), draft, seconds_per_proposal=0.2, seconds_per_drafting=0.1)
    assert model.proposal_of_round(2) + StepTimes.of(model, 2, 0, 0.0).first[2] == pytest.approx(0.4 + 0.05)
    model.proposals_per_round = 0.25
    assert model.proposal_of_round(2) + StepTimes.of(model, 2, 0, 0.0).first[2] == pytest.approx(0.1 + 0.05)


def test_drafts_that_are_made_within_rounds_say_nothing_of_proposals():
    draft = PassSeconds([1, 64], [0.05, 0.05])
    model = CostModel(PassSeconds(NODES, known()), draft, seconds_per_proposal=0.05, seconds_per_step=0.1)
    for _ in range(100):
        model.observe_target(PassShape(4, 1), model.target.of_rows(4))
        model.observe_proposal([], 1e-4, 1, 0.3, 4)
    assert (model.seconds_per_proposal, draft.of_rows(1)) == (0.05, 0.05)
    assert model.rest(1, 4) == pytest.approx(0.3, rel=0.05)


def test_what_a_host_takes_beside_every_step_is_not_on_the_proposals_account():
    """Though steps that draft are all that is heard at first. Plain ones may show later that it was the drafts."""
    draft = PassSeconds([1, 64], [0.05, 0.05])
    model = CostModel(PassSeconds(NODES, known()), draft, seconds_per_proposal=0.05, seconds_per_step=0.1)

    def hear(plain_rest):
        for _ in range(200):
            model.observe_target(PassShape(4, 1), model.target.of_rows(4))
            model.observe_proposal([PassShape(1, 1)], 0.1, 1, 0.5)
            if plain_rest is not None:
                model.observe_rest(plain_rest, 1)

    hear(None)
    assert (model.rest(1), model.proposal(1)) == pytest.approx((0.5, 0.05), rel=0.05)
    hear(0.2)
    assert (model.rest(1), model.proposal(1)) == pytest.approx((0.2, 0.35), rel=0.05)
    assert model.draft.of_rows(1) == pytest.approx(0.05, rel=0.05)


def test_it_is_the_same_behind_its_own_plain_data():
    model = CostModel(
        PassSeconds(NODES, known(), 1e-5, 1e-7, 1e-7),
        PassSeconds([1, 2], [0.1, 0.2]),
        seconds_per_proposal=0.01,
        seconds_per_step=0.05,
        seconds_per_drafting=0.02,
        seconds_per_sequence=0.03,
        per_row_behind=0.04,
    )
    again = CostModel.of_dict(json.loads(json.dumps(model.as_dict())))
    assert again.as_dict() == model.as_dict()
    assert again.drafting.per_row_behind == 0.04
    assert again.target.of(PassShape(7, 2, 100)) == model.target.of(PassShape(7, 2, 100))
    assert CostModel.of_dict(CostModel(PassSeconds(NODES, known())).as_dict()).draft is None


@pytest.mark.parametrize("true", [0.02, 0.4])
def test_what_it_takes_to_catch_up_is_learned_apart_from_passes_of_many_sequences(true):
    """100 rows behind of 4 sequences, which have 2 each in any step: 0.1 s each is thought, by the table's end."""
    model = CostModel(PassSeconds(NODES, known()), PassSeconds([1, 8, 16], [1.0, 1.2, 2.0]), seconds_per_proposal=0.5)
    behind, usual = PassShape(108, 4), PassShape(5, 4)
    assert model.drafting.per_row_behind == pytest.approx(0.1)
    assert model.drafting.of([behind, usual]) == pytest.approx([1.2 + 100 * 0.1, model.draft.of_rows(5)])
    table = list(model.draft.seconds)
    for _ in range(20):
        model.observe_target(PassShape(16, 4), 2 * model.target.of_rows(16))  # the machine is slow
        model.observe_proposal([behind, usual], 2 * (0.5 + 1.2 + 100 * true + model.draft.of_rows(5)), 4)
    assert model.drafting.per_row_behind == pytest.approx(true, rel=0.05)
    assert (model.draft.seconds, model.seconds_per_proposal) == (table, 0.5)
    assert not model.drafting.caught_up(PassShape(15, 4), 9.0, 1.0), "most of it is as in any step"
    for _ in range(100):
        model.drafting.caught_up(behind, 1e-6, 2.0)
    assert model.drafting.per_row_behind == 0.1 * 2.0 / 16, "a tenth of a row's part of a pass"


def test_of_a_proposal_some_rows_of_which_are_there_to_catch_up_the_others_are_learned():
    """Of 12 rows of 4 sequences 4 are; the pass of the 8 others takes 1.5 times as long as thought."""
    passes = DraftPasses(PassSeconds([1, 8, 16], [1.0, 1.2, 2.0]), per_row_behind=0.1)
    shape = PassShape(12, 4)
    for _ in range(200):
        of_passes = passes.of([shape])
        assert of_passes == [pytest.approx(passes.draft.of_rows(8) + 0.4)]
        passes.learn([shape], of_passes, of_passes[0], math.log((1.8 + 0.4) / of_passes[0]), 1.0)
    assert passes.draft.of_rows(8) == pytest.approx(1.8, rel=0.02)
    assert passes.draft.seconds[::2] == [1.0, 2.0], "and nothing else"


def test_where_drafting_takes_a_host_less_nowhere_else_is_it_taken_for_less_than_nothing():
    """Of 32 sequences a step that drafts takes 0.7 of what others take beside their passes."""
    model = CostModel(PassSeconds(NODES, known()), seconds_per_step=0.01, seconds_per_sequence=0.1)
    model._drafting_rests[5] = 0.7
    assert model.drafting_rest(32) == 0.7
    assert model.drafting_rest(1) == 1.0
    assert DraftPasses(PassSeconds([1, 8], [1.0, 1.0])).per_row_behind == pytest.approx(0.1 / 8), "never nothing"


def test_passes_that_make_drafts_within_a_call_are_learned_and_proposals_say_nothing_of_them_then():
    """The draft takes twice as long as was probed, and a proposal four times as long beside its passes.

    What is heard of the passes twice does not count twice.
    """
    model = CostModel(PassSeconds([1, 8], [1e-3, 2e-3]), PassSeconds([1, 8], [1e-4, 1e-4]), seconds_per_proposal=2e-5)
    for i in range(200):
        passes = [PassShape(1, 1, 0.0)] * (3, 1, 5)[i % 3]
        model.observe_drafting(passes, 2e-4 * len(passes))
        model.observe_proposal(passes, 2e-4 * len(passes) + 8e-5, 1)
        assert model.proposal(1) < 1.3 * 8e-5
    assert model.draft.of_rows(1) == pytest.approx(2e-4, rel=0.05)
    assert model.drafting.cold.seconds < 1e-5
    assert model.proposal(1) == pytest.approx(8e-5, rel=0.3)


@pytest.mark.parametrize("depths", [(1,), (1, 2, 5), (5, 1)])
def test_of_drafts_within_a_call_the_first_pass_may_take_far_longer_than_those_that_follow(depths):
    """Its weights are out of the caches: 0.3 ms more, where passes were probed as 0.1 ms, and take 0.15."""
    wrong = []
    for seed in range(40):
        rng = random.Random(seed)
        model = CostModel(PassSeconds([1, 8], [1e-3, 2e-3]), PassSeconds([1, 8], [1e-4, 1e-4]))
        for _ in range(200):
            depth = rng.choice(depths)
            noise = (3.0 if rng.random() < 0.05 else 1.0) * math.exp(rng.gauss(0, 0.05))
            model.observe_drafting([PassShape(1, 1, 0.0)] * depth, noise * (3e-4 + 1.5e-4 * depth))
        model.proposals_per_round = 0.0
        times = StepTimes.of(model, 1, 5, 0.0)
        assert times.first[0] == 0.0
        wrong.append(max(abs(times.drafting([depth]) / (3e-4 + 1.5e-4 * depth) - 1.0) for depth in depths))
        model.proposals_per_round = 1.0  # which have it beside their passes
        assert StepTimes.of(model, 1, 5, 0.0).first[1] == pytest.approx(times.later[1])
        if len(depths) > 1:
            wrong.append(abs(times.later[1] / 1.5e-4 - 1.0))
    assert sorted(wrong)[len(wrong) * 9 // 10] < 0.15


def test_a_single_round_that_takes_long_says_nothing_and_two_do():
    cold = ColdPass()
    for _ in range(50):
        cold.observe(1e-4, 1e-4, 2e-4)
    before = cold.seconds
    cold.observe(1e-4, 1e-4, 2.3e-4)  # a bit longer
    assert before < cold.seconds < 1.2 * before
    before = cold.seconds
    assert cold.observe(1e-4, 1e-4, 8e-4) == 1.0
    assert cold.seconds == before
    cold.observe(1e-4, 1e-4, 2e-4)
    cold.observe(1e-4, 1e-4, 8e-4)
    scale = cold.observe(1e-4, 1e-4, 8e-4)
    assert cold.seconds + scale * 1e-4 > 2.6e-4


def test_what_passes_of_few_rows_have_shown_says_little_of_those_of_many():
    model = CostModel(PassSeconds([1, 8], [1e-3, 2e-3]), PassSeconds([1, 8, 64], [1e-4, 1e-4, 8e-4]))
    for i in range(200):
        depth = 1 + i % 4
        model.observe_drafting([PassShape(1, 1, 0.0)] * depth, 2e-4 * depth)
    assert model.draft.of_rows(1) > 1.8e-4
    assert model.draft.of_rows(64) < 9e-4


def test_who_no_longer_drafts_within_calls_learns_from_proposals_again():
    model = CostModel(PassSeconds([1, 8], [1e-3, 2e-3]), PassSeconds([1, 8], [1e-4, 2e-4]), seconds_per_proposal=1e-7)
    passes = [PassShape(1, 1, 0.0)] * 3
    model.observe_drafting(passes, 3e-4)
    for seconds in [3e-4] * 40 + [6e-4] * 60:
        model.observe_proposal(passes, seconds, 1)
    assert model.draft.of_rows(1) == pytest.approx(2e-4, rel=0.1)


def heads(following=0.2, first_share=0.5, draft=0.1):
    """Of heads whose pass over what the target has run takes `following` of the target's, and less for fewer rows."""
    passes = [PassSeconds(NODES, known(scale)) for scale in (1.0, draft, following)]
    return CostModel(passes[0], passes[1], following=passes[2], first_share=first_share)


def test_heads_follow_before_they_draft():
    """Worked example: 3 rows of 2 sequences are followed, then come drafts of both, and one more of the first."""
    costs = heads()
    passes = [PassShape(3, 2), PassShape(2, 2), PassShape(1, 1)]
    assert costs.drafting.of(passes) == pytest.approx([0.2, 0.05, 0.1])
    assert costs.drafting.of(passes[:1]) == pytest.approx([0.2])  # who follows alone
    costs.drafting.rows_of_first = 16.0
    times = StepTimes.of(costs, 2, 4, 0.0)
    assert times.first[1:] == pytest.approx([0.2 * (0.4 + 0.06 * 16) + 0.05, 0.2 * (0.4 + 0.06 * 32) + 0.05])
    assert times.later[1:] == pytest.approx([0.1, 0.1])
    assert times.drafting([3, 1]) == pytest.approx(times.first[2] + 2 * 0.1)


def test_what_heads_take_is_recovered_from_noisy_proposals():
    """Following was probed as half of what it takes, drafting as twice; proposals of several depths tell them apart."""
    rng = random.Random(2)
    costs, truth = heads(0.1, 1.0, 0.2), heads(0.2, 1.0, 0.1)
    for _ in range(8_000):
        num_rows, depth = rng.choice([1, 3, 6, 12]), rng.choice([0, 1, 2, 5])
        passes = [PassShape(num_rows, 2)] + [PassShape(2, 2)] * depth
        noise = (3.0 if rng.random() < 0.1 else 1.0) * math.exp(rng.gauss(0, 0.05))
        costs.observe_drafting(passes, noise * sum(truth.drafting.of(passes)))
    for of, expected in ((costs.following, truth.following), (costs.draft, truth.draft)):
        for n in (1, 2, 6, 12) if of is costs.following else (2,):
            assert of.of_rows(n) == pytest.approx(expected.of_rows(n), rel=0.08)
    assert costs.drafting.rows_of_first == pytest.approx(2.75, rel=0.5)  # 1, 3, 6 or 12 rows of two sequences


def test_costs_of_heads_are_kept():
    costs = heads()
    again = CostModel.of_dict(json.loads(json.dumps(costs.as_dict())))
    assert again.as_dict() == costs.as_dict()
    assert "to follow the target" in str(again)


def test_while_a_device_runs_a_round_its_host_takes_no_time_of_it():
    model = CostModel(PassSeconds([1, 8], [1.0, 2.0]), PassSeconds([1, 8], [0.1, 0.2]), 0.5, 0.3)
    model.seconds_per_drafting = 0.01
    of_host = StepTimes.of(model, 4, 4, 100.0)
    model.hides_host = True
    hidden = StepTimes.of(model, 4, 4, 100.0)
    assert hidden.plain == pytest.approx(of_host.plain - model.rest(4))
    assert hidden.verify[4] == pytest.approx(of_host.verify[4] - model.rest(4))
    assert hidden.first[4] == pytest.approx(of_host.first[4] - 4 * model.seconds_per_drafting)
    assert model.proposal_of_round(4) == 0.0
