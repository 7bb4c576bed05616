"""What a pair is worth: the arithmetic on known rounds, and what is counted of drafts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specpaged.comparison.job import Job
from specpaged.comparison.pair_profile import PairProfile, RoundTimes, _decode, _tokens_per_round
from specpaged.comparison.profiling_planner import ProfilingController
from specpaged.speculation.controller import Candidate
from specpaged.speculation.cost_model import CostModel
from specpaged.speculation.pass_seconds import PassSeconds

COSTS = CostModel(PassSeconds([1, 2], [1.0, 1.0]))


def rounds(per_draft, acceptance, sizes=(1, 8, 64), own=1.0):
    """Of a target whose round takes 10 s, to which each draft adds `per_draft` for each sequence; and `own` of its."""
    tokens, chance = [1.0], 1.0
    for rate in acceptance:
        chance *= rate
        tokens.append(tokens[-1] + chance)
    seconds = {size: [10.0 + k * (own + per_draft * size) for k in range(len(acceptance) + 1)] for size in sizes}
    return RoundTimes(seconds, tokens)


def test_what_is_expected_is_tokens_over_time():
    assert rounds(0.0, [0.5, 0.5]).speeds(1) == pytest.approx([1.0, 1.5 * 10 / 11, 1.75 * 10 / 12])
    assert rounds(0.0, [0.5, 0.5]).best(1) == 2


def test_where_drafts_cost_by_sequence_drafting_stops_paying_with_the_batch():
    found = rounds(0.1, [0.6] * 8)
    assert found.best(1) > 0
    assert found.best(64) == 0
    assert found.pays_up_to == 8
    assert rounds(0.0, [0.3] * 8, own=9.0).pays_up_to is None


def test_vllm_is_asked_for_what_pays_in_single_rounds():
    several, single, none = rounds(0.1, [0.6] * 8), rounds(0.1, [0.6] * 8, own=3.0), rounds(1.0, [0.6] * 8, own=9.0)
    pair = PairProfile(COSTS, [0.6] * 8, {}, 1.0, several, single)
    assert 0 < single.best(1) < several.best(1)
    assert pair.most_in_vllm == single.best(1)
    assert PairProfile(COSTS, [0.6] * 8, {}, 1.0, several, none).most_in_vllm == 0
    assert pair.as_dict()["pays_up_to"] == several.pays_up_to
    assert pair.as_dict()["single_rounds"]["best"]["1"] == single.best(1)


def test_of_equals_the_shorter_draft_is_the_best():
    found = rounds(0.0, [1.0, 0.0, 0.0], own=0.0)
    assert found.speeds(1)[1] == found.speeds(1)[3]
    assert found.best(1) == 1


def test_a_round_brings_its_drafts_and_one_token_more_where_all_of_them_stand(tokenizer_pair):
    own, most = tokenizer_pair.target, {"max_prompt_tokens": 20, "max_tokens": 61, "max_num_seqs": 2}
    job = Job.prepare(
        model=own, draft_model=own, method="draft_model", prompts=None, num_prompts=2, num_speculative_tokens=None,
        temperature=0.0, seed=None, threads=1, output=None, numerics="exact", **most,
    )  # fmt: skip
    job = replace(job, params=[replace(params, ignore_eos=True) for params in job.params])
    planner = job.llm.engine.speculative_step.planner
    assert [_tokens_per_round(job, k) for k in (1, 2, 4)] == [2.0, 3.0, 5.0]  # 60 tokens are so many whole rounds
    assert job.llm.engine.speculative_step.planner is planner


def test_outcomes_are_counted_by_place_and_request():
    controller = ProfilingController(COSTS)
    assert controller.plan([Candidate("a", 3), Candidate("b", 9)]).num_draft_tokens == [3, 8]
    assert controller.select("ab", [[1.0] * 3, []]) == [3, 0]
    controller.observe_drafts("a", 2, 1)
    controller.observe_drafts("a", 1, 0)
    assert controller.num_trials["a"][:4] == [2, 1, 1, 0]
    assert controller.num_accepted["a"][:4] == [2, 1, 0, 0]


@pytest.mark.parametrize("method", ["draft_model", "ngram,draft_model", "ngram,suffix"])
def test_every_draft_that_is_verified_is_counted_whoever_has_made_it(tokenizer_pair, method):
    with_model = "draft_model" in method
    job = Job.prepare(
        model=tokenizer_pair.target, draft_model=tokenizer_pair.draft if with_model else None, method=method,
        prompts=None, num_prompts=4, num_speculative_tokens=None, temperature=0.0, seed=None, threads=1, output=None,
        max_prompt_tokens=40, max_tokens=60, max_num_seqs=2,
    )  # fmt: skip
    step = job.llm.engine.speculative_step
    controller, metrics = ProfilingController(COSTS, step.drafter), step.metrics
    before = metrics.drafts, metrics.accepted_tokens
    _decode(job, controller)
    assert controller.num_drafted >= metrics.drafts - before[0] > 0
    num_accepted = sum(map(sum, controller.num_accepted.values()))
    assert num_accepted >= metrics.accepted_tokens - before[1] > 0
    assert controller.num_asked >= controller.num_drafted
