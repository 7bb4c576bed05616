"""Of a drafter that has to follow: who is followed for nothing is given up, and others are not even begun with."""

from __future__ import annotations

import pytest

from specpaged import SamplingParams
from specpaged.engine.followers import _FRUITLESS, _IDLE, _ONE_OF, _ONE_OF_MOST, Followers
from specpaged.paging.page_table import DRAFT, TARGET
from specpaged.speculation.controller import Plan
from tests import toys
from tests.engine.test_engine import generate, token_ids
from tests.heads_world import heads_llm, plain_llm


class Drafting:
    """As much of a sequence as is looked at."""

    max_draft_tokens = 4
    model_drafts = True

    @property
    def max_model_draft_tokens(self):
        return self.max_draft_tokens if self.model_drafts else 0


def give_up(followers, count):
    for _ in range(count):
        idle = Drafting()
        followers.planned([idle], [0], 1000)  # the time of others
        followers.planned([idle], [0], _IDLE + 1)


def test_who_has_had_no_drafts_for_long_drafts_no_more():
    followers, idle, drafting = Followers(), Drafting(), Drafting()
    for _ in range(5):
        followers.planned([idle, drafting], [0, 0], _IDLE // 3)
        if idle.max_draft_tokens:
            followers.planned([drafting], [2], 1)
    assert idle.max_draft_tokens == 0
    assert drafting.max_draft_tokens == 4
    assert followers.num_followed == 1
    followers.forget(drafting)
    assert followers.num_followed == 0


def test_of_new_ones_most_are_not_followed_once_several_were_so_for_nothing():
    followers = Followers()
    assert all(followers.admits() for _ in range(20))
    give_up(followers, _FRUITLESS)
    assert sum(followers.admits() for _ in range(5 * _ONE_OF)) == 5
    give_up(followers, 1)
    assert sum(followers.admits() for _ in range(5 * 2 * _ONE_OF)) == 5
    give_up(followers, 100)
    assert sum(followers.admits() for _ in range(5 * _ONE_OF_MOST)) == 5
    followers.planned([Drafting()], [1], 1)  # a trial has turned out well
    assert all(followers.admits() for _ in range(20))


class Never:
    """A controller that drafts for nobody, and takes its time."""

    def plan(self, candidates, num_steps):
        return Plan([0] * len(candidates), num_steps=4)

    def __getattr__(self, name):
        return lambda *_: None


@pytest.mark.parametrize("method", ["eagle3", "clover"])
@pytest.mark.parametrize("arguments", [{}, {"enable_prefix_caching": True}, {"num_scheduler_steps": 1}], ids=str)
def test_requests_that_are_given_up_come_out_the_same_and_heads_run_no_more_of_them(target, heads, method, arguments):
    llm = heads_llm(target, method, heads[method], "auto", **arguments)
    step = llm.engine.speculative_step
    step.planner.controller = Never()
    proposed, propose = [], step.drafter.propose
    step.drafter.propose = lambda rows, *others: proposed.append(rows) or propose(rows, *others)
    prompts = [*toys.prompts(6, longest=30), *toys.prompts(6, longest=30)]
    params = [
        SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=60 + i, ignore_eos=True, n=1 + i % 2)
        for i in range(12)
    ]
    expected = token_ids(plain_llm(target, max_num_seqs=8).generate(prompts, params, use_tqdm=False))
    engine = llm.engine
    for i, (prompt, of_request) in enumerate(zip(prompts[:6], params, strict=False)):
        engine.add_request(str(i), prompt["prompt_token_ids"], of_request)
    while engine.has_unfinished_requests:
        engine.step()
        for running in engine.scheduler.running:
            context_lens = running.page_table.context_lens
            followed = running.max_draft_tokens > 0
            assert len(context_lens) == 1 or context_lens[DRAFT] == context_lens[TARGET] or not followed
    assert step.planner.followers.num_followed == 0
    num_calls = len(proposed)
    assert token_ids(generate(llm, prompts, params)) == expected
    followed = {row.sequence for rows in proposed[num_calls:] for row in rows}
    assert len(followed) <= 2  # of 18 sequences, as a request with two is a trial at most
    assert llm.metrics.failed_proposals == 0


@pytest.mark.parametrize("keeps_lookups", [False, True])
def test_who_is_given_up_keeps_the_drafts_of_lookups_beside(keeps_lookups):
    followers, idle = Followers(keeps_lookups), Drafting()
    for _ in range(3):
        followers.planned([idle], [0], _IDLE)
    assert (idle.max_draft_tokens, idle.max_model_draft_tokens) == (4 if keeps_lookups else 0, 0)
    assert followers.num_followed == 0


@pytest.mark.parametrize("method", ["eagle3", "clover"])
@pytest.mark.parametrize("arguments", [{}, {"enable_prefix_caching": True}, {"num_scheduler_steps": 1}], ids=str)
def test_beside_lookups_heads_give_up_too_and_lookups_go_on(target, heads, method, arguments, monkeypatch):
    """To follow the target takes as much time as without lookups, which none of their drafts makes up for."""
    monkeypatch.setattr("specpaged.engine.followers._IDLE", 8)
    llm = heads_llm(target, ["ngram", method], heads[method], "auto", **arguments)
    step = llm.engine.speculative_step
    step.planner.controller.model.plan = Never().plan
    followed, taken, propose, rounds = [], [], step.drafter.propose, step.target.rounds

    def seen(rows, *others):
        followed.extend(row.sequence for row in rows if row.hidden_states is not None)
        taken.extend(row.sequence for row in rows if row.lookup is not None)
        return propose(rows, *others)

    step.drafter.propose = seen
    step.target.rounds = lambda rows, vocab, num, draft, *others: (
        followed.extend([draft] if draft is not None else []) or rounds(rows, vocab, num, draft, *others)
    )
    beginnings = [prompt["prompt_token_ids"][:4] for prompt in toys.prompts(6, shortest=4)]
    prompts = [{"prompt_token_ids": (beginning * 9)[:30]} for beginning in beginnings]
    params = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
    expected = token_ids(plain_llm(target, max_num_seqs=8).generate(prompts, params, use_tqdm=False))
    assert token_ids(generate(llm, prompts, params)) == expected
    assert step.planner.followers.num_followed == 0
    assert followed
    num_followed, drafts = len(followed), llm.metrics.draft_tokens
    assert token_ids(generate(llm, prompts[:1], params)) == expected[:1]  # none that is admitted for a trial
    assert len(followed) == num_followed
    assert llm.metrics.draft_tokens > drafts
    assert llm.metrics.failed_proposals == 0
