"""A step is all or nothing: what fails in it, once or for one request, is in nobody else's output."""

from __future__ import annotations

import logging
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specpaged import SamplingParams
from specpaged.engine.stop_checker import StopChecker
from specpaged.paging.block_allocator import BlockAllocator, IntegrityError
from specpaged.paging.page_table import DRAFT
from tests import toys
from tests.engine.failure_histories import MAX_MODEL_LEN, Sabotage, run_history
from tests.engine.test_engine import GREEDY, generate, make_llm, token_ids


@pytest.fixture(scope="module")
def plain(tokenizer_pair):
    return make_llm(tokenizer_pair, k=0, max_num_seqs=1, max_model_len=MAX_MODEL_LEN)


@settings(max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_failures_at_random_points_of_random_histories_change_no_output(tokenizer_pair, plain, seed):
    run_history(seed, tokenizer_pair, plain)


def fails_once(monkeypatch, owner, method, behind=False):
    """The next call of a method raises, before or behind what it does; how many have been made."""
    honest, calls = getattr(type(owner), method), []

    def call(self, *arguments, **options):
        calls.append(arguments)
        if len(calls) > 1:
            return honest(self, *arguments, **options)
        if behind:
            honest(self, *arguments, **options)
        raise Sabotage(method)

    monkeypatch.setattr(type(owner), method, call)
    return calls


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
def test_a_fork_whose_copy_fails_is_computed_anew(tokenizer_pair, monkeypatch, behind):
    prompts = toys.prompts(2, shortest=21, longest=30)
    params = SamplingParams(n=3, temperature=0.8, seed=3, max_tokens=20, ignore_eos=True)
    expected = token_ids(generate(make_llm(tokenizer_pair, k=0), prompts, params))
    llm = make_llm(tokenizer_pair, k=3, draft=tokenizer_pair.target, speculative={"numerics": "exact"})
    calls = fails_once(monkeypatch, llm.engine.target.kv_cache, "copy_blocks", behind)
    assert token_ids(generate(llm, prompts, params)) == expected
    assert calls
    assert llm.metrics.failed_steps == 1
    assert llm.metrics.acceptance_rate == 1.0


def test_forks_whose_copies_always_fail_are_given_up(tokenizer_pair, monkeypatch):
    prompts = toys.prompts(2, shortest=21, longest=30)
    params = SamplingParams(n=3, temperature=0.8, seed=3, max_tokens=20, ignore_eos=True)
    expected = token_ids(generate(make_llm(tokenizer_pair, k=0), prompts, params))
    llm = make_llm(tokenizer_pair, k=3)
    monkeypatch.setattr(llm.engine.target.kv_cache, "copy_blocks", lambda _pairs: [].pop())
    assert token_ids(generate(llm, prompts, params)) == expected
    assert llm.metrics.failed_steps == 1


@pytest.mark.parametrize("method", ["publish", "mark_cached"])
def test_what_is_not_published_is_not_shared_and_nobody_ends_for_it(tokenizer_pair, monkeypatch, caplog, method):
    prompts, params = toys.prompts(3, shortest=40), SamplingParams(max_tokens=20, **GREEDY)
    expected = token_ids(generate(make_llm(tokenizer_pair, k=0), prompts, params))
    llm = make_llm(tokenizer_pair, k=3, enable_prefix_caching=True)
    owner = llm.engine.prefix_cache if method == "publish" else llm.engine.allocator
    calls = fails_once(monkeypatch, owner, method)
    with caplog.at_level(logging.WARNING, "specpaged"):
        assert token_ids(generate(llm, prompts, params)) == expected
    assert len(calls) > 1
    assert "is not published" in caplog.text
    assert llm.metrics.failed_steps == 0
    outputs = generate(llm, prompts, params)
    assert token_ids(outputs) == expected
    assert all(output.metrics.cached_prompt_tokens for output in outputs)


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
def test_a_proposal_that_fails_costs_its_drafts_alone(tokenizer_pair, monkeypatch, caplog, behind):
    prompts, params = toys.prompts(4), SamplingParams(max_tokens=20, **GREEDY)
    expected = token_ids(generate(make_llm(tokenizer_pair, k=0), prompts, params))
    llm = make_llm(tokenizer_pair, k=3, draft=tokenizer_pair.target, speculative={"numerics": "exact"})
    drafter, forgotten = llm.engine.speculative_step.drafter, []
    fails_once(monkeypatch, drafter, "propose", behind)
    monkeypatch.setattr(drafter, "forget", lambda sequence: forgotten.append(sequence.request_id))
    with caplog.at_level(logging.WARNING, "specpaged"):
        assert token_ids(generate(llm, prompts, params)) == expected
    assert "a proposal of 4 sequences failed; they have no drafts" in caplog.text
    assert llm.metrics.failed_proposals == 1
    assert llm.metrics.acceptance_rate == 1.0
    assert Counter(forgotten) == dict.fromkeys("0123", 2)  # by the failure, and when they end


@pytest.mark.parametrize("whose", ["the first rank's", "this rank's"])
def test_a_proposal_that_fails_on_one_rank_leaves_kv_of_known_tokens_alone(tokenizer_pair, monkeypatch, whose):
    """All take the drafts of the first rank, which are none where it is its own proposal that failed."""
    prompts, params = toys.prompts(3), SamplingParams(max_tokens=20, **GREEDY)
    expected = token_ids(generate(make_llm(tokenizer_pair, k=0), prompts, params))
    llm = make_llm(tokenizer_pair, k=3, draft=tokenizer_pair.target, speculative={"numerics": "exact"})
    engine, right = llm.engine, iter(range(100))
    step = engine.speculative_step

    def agree(drafts):
        i = next(right)
        if whose == "this rank's":
            return [[5, 6] for _ in drafts] if i == 1 else drafts
        return [[] for _ in drafts] if i == 1 else drafts

    monkeypatch.setattr(step, "agree", agree)
    honest, calls = step.drafter.propose, []

    def propose(*args):
        calls.append(None)
        if whose == "this rank's" and len(calls) == 2:
            raise Sabotage("propose")
        return honest(*args)

    monkeypatch.setattr(step.drafter, "propose", propose)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt["prompt_token_ids"], params)
    outputs = {}
    while engine.has_unfinished_requests:
        outputs |= {output.request_id: output for output in engine.step()}
        for sequence in engine.scheduler:
            drafted = max(0, len(sequence.draft) - 1)
            assert sequence.page_table.context_lens[DRAFT] <= sequence.num_tokens + drafted
    assert token_ids([outputs[str(i)] for i in range(3)]) == expected
    assert len(calls) > 3


@pytest.mark.parametrize("method", ["score", "verify"])
def test_a_pass_that_fails_for_one_request_is_its_own_failure(tokenizer_pair, monkeypatch, method):
    prompts, params = toys.prompts(5), SamplingParams(max_tokens=20, **GREEDY)
    expected = token_ids(generate(make_llm(tokenizer_pair, k=0), prompts, params))
    llm = make_llm(tokenizer_pair, k=3, draft=tokenizer_pair.target, speculative={"numerics": "exact"})
    step = llm.engine.speculative_step
    honest = getattr(step, method)

    def poisoned(argument, *others, **options):
        entries = getattr(argument, "entries", argument)
        if any(e.sequence.request_id == "2" and len(e.sequence.output_token_ids) > 6 for e in entries):
            raise MemoryError("too much")
        return honest(argument, *others, **options)

    monkeypatch.setattr(step, method, poisoned)
    outputs = generate(llm, prompts, params)
    failed = outputs.pop(2)
    assert failed.error == "request '2': MemoryError: too much"
    cut = expected.pop(2)[0]
    assert failed.outputs[0].token_ids == cut[: len(failed.outputs[0].token_ids)]
    assert len(failed.outputs[0].token_ids) > 6
    assert token_ids(outputs) == expected
    assert llm.metrics.acceptance_rate == 1.0
    monkeypatch.undo()
    hundred = [prompts[i % 5] for i in range(100)]
    again = token_ids(generate(llm, hundred, params))
    assert [ids for i, ids in enumerate(again[:5]) if i != 2] == expected
    assert again == again[:5] * 20


@pytest.mark.parametrize("method", ["finish", "forget", "_make_room"])
@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
def test_who_is_coming_or_going_when_a_step_fails_comes_and_goes(tokenizer_pair, monkeypatch, method, behind):
    prompts, params = toys.prompts(3, shortest=40), SamplingParams(max_tokens=5, **GREEDY)
    expected = token_ids(generate(make_llm(tokenizer_pair, k=0), prompts, params))
    llm = make_llm(tokenizer_pair, k=3, enable_prefix_caching=True)
    assert token_ids(generate(llm, prompts, params)) == expected
    owner = llm.engine.speculative_step.drafter if method == "forget" else llm.engine.scheduler
    calls = fails_once(monkeypatch, owner, method, behind)
    assert token_ids(generate(llm, prompts, params)) == expected
    assert len(calls) > 1
    assert llm.metrics.failed_steps == (method != "forget")
    assert llm.engine.allocator.num_held == 0
    assert not llm.engine.requests
    llm.engine.check_integrity()


def test_the_first_error_of_a_request_stands_though_its_step_is_run_anew(tokenizer_pair, monkeypatch):
    llm = make_llm(tokenizer_pair, k=3, num_scheduler_steps=1)  # so that drafts are made behind the commit
    prompts, params = toys.prompts(3), SamplingParams(max_tokens=8, stop=["never"], **GREEDY)
    expected = token_ids(generate(make_llm(tokenizer_pair, k=0), prompts, params))
    honest, unreadable = StopChecker.append, []

    def append(checker, token_id):
        reason = honest(checker, token_id)
        if reason and not unreadable:
            unreadable.append(checker)
            raise KeyError("a token that nobody knows")
        return reason

    monkeypatch.setattr(StopChecker, "append", append)

    def realign(running):
        if len(unreadable) == 1:
            unreadable.append(None)
            raise Sabotage("realign")

    monkeypatch.setattr(llm.engine.kv_layout, "realign", realign)
    outputs = generate(llm, prompts, params)
    failed = [i for i, output in enumerate(outputs) if output.error]
    assert [outputs[i].error for i in failed] == [f"request '{failed[0]}': KeyError: 'a token that nobody knows'"]
    for output, (ids,) in zip(outputs, expected, strict=True):
        assert output.outputs[0].token_ids == ids
    assert llm.metrics.failed_steps == 1
    llm.engine.add_request("late", prompts[0]["prompt_token_ids"], params)
    (sequence,) = llm.engine.scheduler
    for error in (KeyError("first"), MemoryError("second")):
        sequence.fail(error)
    assert [output.error for output in llm.engine.step()] == ["request 'late': KeyError: 'first'"]


def test_what_fails_in_every_prefill_is_raised_and_not_tried_for_ever(tokenizer_pair, monkeypatch):
    """Its first chunk succeeds again each time."""
    llm = make_llm(tokenizer_pair, k=0, max_num_batched_tokens=16)
    honest = llm.engine.kv_layout.place

    def place(entries):
        if any(entry.context_len > 0 for entry in entries):
            raise MemoryError("no more than a chunk")
        honest(entries)

    with monkeypatch.context() as patched:
        patched.setattr(llm.engine.kv_layout, "place", place)
        with pytest.raises(RuntimeError, match="a step failed twice: MemoryError: no more than a chunk"):
            llm.generate(toys.prompts(2, shortest=40), use_tqdm=False)
    assert llm.engine.allocator.num_held == 0


def test_two_failures_with_tokens_between_them_are_two_first_ones(tokenizer_pair, monkeypatch):
    prompts, params = toys.prompts(3), SamplingParams(max_tokens=20, **GREEDY)
    expected = token_ids(generate(make_llm(tokenizer_pair, k=0), prompts, params))
    llm = make_llm(tokenizer_pair, k=0, num_scheduler_steps=1)
    honest, calls = llm.engine.scheduler.schedule, []

    def schedule():
        calls.append(None)
        if len(calls) in (4, 9):
            raise Sabotage("schedule")
        return honest()

    monkeypatch.setattr(llm.engine.scheduler, "schedule", schedule)
    assert token_ids(generate(llm, prompts, params)) == expected
    assert llm.metrics.failed_steps == 2


@pytest.mark.parametrize("method", ["schedule", "commit"])
@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
def test_a_step_that_fails_is_run_anew_from_its_tokens(tokenizer_pair, monkeypatch, method, behind):
    prompts, params = toys.prompts(4), SamplingParams(max_tokens=20, **GREEDY)
    expected = token_ids(generate(make_llm(tokenizer_pair, k=0), prompts, params))
    llm = make_llm(
        tokenizer_pair, k=3, draft=tokenizer_pair.target, speculative={"numerics": "exact"}, num_scheduler_steps=1
    )
    engine = llm.engine
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt["prompt_token_ids"], params)
    for _ in range(3):
        engine.step()
    fails_once(monkeypatch, engine.scheduler if method == "schedule" else engine.speculative_step, method, behind)
    assert engine.step() == []
    assert engine.allocator.num_held == 0
    outputs = {}
    while engine.has_unfinished_requests:
        outputs |= {output.request_id: output for output in engine.step()}
        engine.check_integrity()
    assert token_ids([outputs[str(i)] for i in range(4)]) == expected
    assert engine.metrics.failed_steps == 1
    assert engine.metrics.acceptance_rate == 1.0


def test_a_step_that_fails_twice_raises_and_the_third_one_is_right(tokenizer_pair, monkeypatch):
    prompts, params = toys.prompts(4), SamplingParams(max_tokens=20, **GREEDY)
    expected = token_ids(generate(make_llm(tokenizer_pair, k=0), prompts, params))
    llm = make_llm(tokenizer_pair, k=3)
    with monkeypatch.context() as patched:
        patched.setattr(llm.engine.scheduler, "schedule", lambda: [].pop())
        with pytest.raises(RuntimeError, match="a step failed twice: IndexError: pop from empty list"):
            llm.generate(prompts, params, use_tqdm=False)
    assert llm.engine.allocator.num_held == 0
    assert not llm.engine.requests
    assert token_ids(generate(llm, prompts, params)) == expected


def test_a_broken_invariant_is_raised_at_once(tokenizer_pair, monkeypatch):
    llm = make_llm(tokenizer_pair, k=3, enable_prefix_caching=True)

    def broken(*_, **__):
        raise IntegrityError("a block has two owners")

    step = llm.engine.speculative_step
    for owner, method in (
        (step, "score"), (step, "commit"), (step, "_emit"), (step.drafter, "propose"),
        (llm.engine.prefix_cache, "publish"),
    ):  # fmt: skip
        with monkeypatch.context() as patched:
            patched.setattr(type(owner), method, broken)
            with pytest.raises(IntegrityError, match="a block has two owners"):
                llm.generate(toys.prompts(2), use_tqdm=False)
        assert llm.engine.allocator.num_held == 0
    with monkeypatch.context() as patched:
        patched.setattr(step, "score", lambda entries, **_: broken() if len(entries) == 1 else [].pop())
        with pytest.raises(IntegrityError, match="a block has two owners"):
            llm.generate(toys.prompts(2), use_tqdm=False)
    generate(llm, toys.prompts(2), SamplingParams(max_tokens=4))


def test_generate_ends_with_a_look_at_its_blocks_and_not_at_all_of_them(tokenizer_pair, monkeypatch):
    llm = make_llm(tokenizer_pair, k=3)
    with monkeypatch.context() as patched:
        patched.setattr(BlockAllocator, "check_integrity", lambda *_: [].pop())
        llm.generate(toys.prompts(2), SamplingParams(max_tokens=4), use_tqdm=False)
    llm.engine.allocator.allocate()
    with pytest.raises(IntegrityError, match="1 blocks are held, and no sequence is here to hold them"):
        llm.generate(toys.prompts(2), SamplingParams(max_tokens=4))


def test_an_interrupted_step_leaves_requests_that_go_on(tokenizer_pair, monkeypatch):
    prompts, params = toys.prompts(3), SamplingParams(max_tokens=20, **GREEDY)
    expected = token_ids(generate(make_llm(tokenizer_pair, k=0), prompts, params))
    engine = make_llm(tokenizer_pair, k=3).engine
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt["prompt_token_ids"], params)
    engine.step()

    def interrupted(*_arguments, **_options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(engine.target, "rounds", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    outputs = {}
    while engine.has_unfinished_requests:
        outputs |= {output.request_id: output for output in engine.step()}
    assert token_ids([outputs[str(i)] for i in range(3)]) == expected


def test_a_prompt_that_was_cached_without_drafts_is_found_by_everybody_and_drafted_behind_with_success(tokenizer_pair):
    """A request that never drafts leaves no draft KV: who drafts takes its blocks, and knows that it is missing."""
    (prompt,) = toys.prompts(1, shortest=40)
    llm = make_llm(
        tokenizer_pair, k=3, draft=tokenizer_pair.target, speculative={"numerics": "exact"}, enable_prefix_caching=True
    )
    plainly = SamplingParams(max_tokens=30, **GREEDY, extra_args={"num_speculative_tokens": 0})
    drafting = SamplingParams(max_tokens=30, **GREEDY)
    expected = token_ids(generate(llm, prompt, plainly))
    cached = []
    for params in (plainly, drafting, drafting, plainly):
        (output,) = generate(llm, prompt, params)
        assert token_ids([output]) == expected
        cached.append(output.metrics.cached_prompt_tokens > 0)
    assert cached == [True] * 4
    assert llm.metrics.acceptance_rate == 1.0
