"""What a drafter says of a sequence's last tokens, as if they were all; and that nothing else comes of it."""

from __future__ import annotations

import pytest

from specpaged import LLM, SamplingParams
from specpaged.speculation.controller import GLANCE, Plan
from tests import toys
from tests.engine.test_decisions import planner_of
from tests.engine.test_engine import generate, make_llm, token_ids

PROMPT_LEN = 20


class Glancer:
    """Drafts nothing and glances whenever that can be done; once all have so many tokens, drafts all it may."""

    def __init__(self, drafts_after=1 << 30):
        self.drafts_after = drafts_after
        self.num_glances = 0
        self.told = []  # how many tokens the sequence had, and how many drafts would have stood, and fallen

    def plan(self, candidates, num_steps):
        if min(candidate.context_len for candidate in candidates) > self.drafts_after:
            return Plan([candidate.most for candidate in candidates])
        glances = [i for i, candidate in enumerate(candidates) if candidate.may_glance]
        self.num_glances += len(glances)
        return Plan([0] * len(candidates), glances, glances=glances)

    def selects(self):
        return False

    def observe_outcomes(self, sequence, num_accepted, num_rejected):
        self.told.append((sequence.num_tokens, num_accepted, num_rejected))

    def __getattr__(self, name):
        return lambda *_: None


def with_glancer(pair, drafts_after=1 << 30, **arguments):
    llm = make_llm(pair, "auto", **arguments)
    glancer = Glancer(drafts_after)
    llm.engine.speculative_step.planner = planner_of(glancer)
    return llm, glancer


def prompts(count):
    return toys.prompts(count, 4, PROMPT_LEN, PROMPT_LEN)


def test_a_glance_says_what_would_be_drafted_behind_the_last_tokens_alone(toy_pair):
    llm, glancer = with_glancer(toy_pair)
    [prompt] = prompts(1)
    [[tokens]] = token_ids(generate(llm, [prompt], SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)))
    known = [*prompt["prompt_token_ids"], *tokens]
    num_tokens, num_stood, num_fallen = glancer.told[-1]
    start = num_tokens - 1 - GLANCE  # the newest token has no KV yet
    ends = range(num_tokens - GLANCE // 2, num_tokens)
    alone = LLM(toy_pair.draft, max_model_len=256, numerics="exact")
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    drafted = token_ids(generate(alone, [{"prompt_token_ids": known[start:end]} for end in ends], one))
    stood = [known[end] == token for end, [[token]] in zip(ends, drafted, strict=True)]
    assert (num_stood, num_fallen) == (stood.count(True), stood.count(False))


@pytest.mark.parametrize("arguments", [{}, {"enable_prefix_caching": True}], ids=["", "prefix cache"])
def test_nothing_is_left_of_a_glance_and_who_drafts_later_catches_up_over_it(toy_pair, arguments):
    params = [
        SamplingParams(temperature=0, max_tokens=120, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=3, max_tokens=110, ignore_eos=True),
        SamplingParams(temperature=0.7, seed=4, max_tokens=100, ignore_eos=True, n=2),
    ]
    expected = token_ids(generate(make_llm(toy_pair, k=0), prompts(3), params))
    llm, glancer = with_glancer(toy_pair, PROMPT_LEN + 70, draft=toy_pair.target, **arguments)
    for _ in range(2):  # the second time, prompts may be found in the cache
        assert token_ids(generate(llm, prompts(3), params)) == expected
    metrics = llm.metrics
    assert glancer.num_glances > 10
    assert metrics.failed_proposals == 0
    assert metrics.acceptance_rate == 1.0  # the draft is the target, and its KV is right
    assert metrics.draft_tokens > 30


def test_whose_draft_reads_a_window_in_blocks_of_its_own_is_not_glanced_at(toy_pair):
    llm, glancer = with_glancer(toy_pair, speculative={"kv_window": 64})
    generate(llm, prompts(1), SamplingParams(temperature=0, max_tokens=80, ignore_eos=True))
    assert glancer.num_glances == 0
