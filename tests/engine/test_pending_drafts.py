"""Drafts are made last and verified in a later step: whatever happens in between, they lose nothing.

The draft is the target itself, so that every draft token is right: one that is rejected was made from a wrong state.
"""

from __future__ import annotations

import pytest

from specpaged import SamplingParams
from specpaged.paging.page_table import DRAFT, TARGET
from tests import toys
from tests.engine.test_engine import GREEDY, generate, make_llm, token_ids

BYTES_PER_TOKEN = 2 * 512  # of a toy target's KV and its draft's


@pytest.fixture(scope="module")
def plain(toy_pair):
    return make_llm(toy_pair, k=0, max_num_seqs=1)


def self_drafting(pair, **arguments):
    """An engine whose draft is its target."""
    speculative = {"numerics": "exact"} | arguments.pop("speculative", {})
    return make_llm(pair, **({"k": 4, "draft": pair.target, "speculative": speculative} | arguments))


def check(llm, plain, prompts, params):
    """Outputs are plain decoding's, and every draft was right."""
    assert token_ids(generate(llm, prompts, params)) == token_ids(generate(plain, prompts, params))
    assert llm.metrics.draft_tokens > 0
    assert llm.metrics.acceptance_rate == 1.0


def watch_steps(llm, monkeypatch):
    """What every step ran: its entries, and what each of their sequences had drafted."""
    schedule, steps = llm.engine.scheduler.schedule, []

    def watched():
        drafts = {sequence: sequence.draft for sequence in llm.engine.scheduler.running}
        scheduled = schedule()
        steps.append([(entry, len(drafts.get(entry.sequence, ()))) for entry in scheduled.entries])
        return scheduled

    monkeypatch.setattr(llm.engine.scheduler, "schedule", watched)
    return steps


def test_after_a_preemption(toy_pair, plain):
    llm = self_drafting(toy_pair, block_size=4, max_model_len=104, kv_cache_memory_bytes=40 * 4 * BYTES_PER_TOKEN)
    check(llm, plain, toys.prompts(6), SamplingParams(max_tokens=60, **GREEDY))
    assert llm.metrics.preemptions > 0


@pytest.mark.parametrize("k", [1, 4])
def test_after_a_hit_in_the_prefix_cache(toy_pair, plain, k):
    shared = toys.prompts(1, shortest=50, longest=50)[0]["prompt_token_ids"]
    prompts = [{"prompt_token_ids": shared + prompt["prompt_token_ids"]} for prompt in toys.prompts(5)]
    llm = self_drafting(toy_pair, k=k, max_num_seqs=2, block_size=8, enable_prefix_caching=True)
    for _ in range(2):
        check(llm, plain, prompts, SamplingParams(max_tokens=20, **GREEDY))
    assert llm.engine.prefix_cache.num_cached_blocks > 6


def test_blocks_of_a_request_of_one_token_hold_the_drafts_kv(toy_pair, plain):
    """It ends in the step that prefills it, before anything is drafted for it."""
    prompt = toys.prompts(1, shortest=60, longest=60)
    llm = self_drafting(toy_pair, block_size=8, enable_prefix_caching=True)
    generate(llm, prompt, SamplingParams(max_tokens=1, **GREEDY))
    outputs = generate(llm, prompt, SamplingParams(max_tokens=20, **GREEDY))
    assert outputs[0].metrics.cached_prompt_tokens == 56
    assert token_ids(outputs) == token_ids(generate(plain, prompt, SamplingParams(max_tokens=20, **GREEDY)))
    assert llm.metrics.acceptance_rate == 1.0


def test_nothing_is_run_for_a_request_of_one_token_whose_blocks_nobody_shares(toy_pair, monkeypatch):
    llm, passes = self_drafting(toy_pair), []
    for name in ("forward", "greedy"):
        monkeypatch.setattr(llm.engine.draft, name, lambda *arguments, **_: passes.append(arguments))
    generate(llm, toys.prompts(3), SamplingParams(max_tokens=1, **GREEDY))
    assert not passes


def test_after_a_fork(toy_pair, plain):
    llm = self_drafting(toy_pair, block_size=4)
    check(llm, plain, toys.prompts(2), SamplingParams(n=3, seed=5, temperature=0.9, max_tokens=16, ignore_eos=True))
    assert llm.metrics.fork_copied_bytes > 0


def test_after_the_abort_of_a_neighbour(toy_pair, plain):
    prompts, params = toys.prompts(4), SamplingParams(max_tokens=24, **GREEDY)
    expected = token_ids(generate(plain, prompts, params))
    llm = self_drafting(toy_pair, num_scheduler_steps=1)
    for i, prompt in enumerate(prompts):
        llm.engine.add_request(str(i), prompt["prompt_token_ids"], params)
    outputs = {}
    for step in range(200):
        if step == 3:
            (sequence,) = llm.engine.requests["1"].sequences
            assert sequence.draft
            llm.engine.abort_request("1")
            assert not sequence.draft
        outputs |= {int(output.request_id): output for output in llm.engine.step()}
    assert token_ids([outputs[i] for i in (0, 2, 3)]) == [expected[i] for i in (0, 2, 3)]
    assert llm.metrics.acceptance_rate == 1.0


def test_after_steps_without_drafts(toy_pair, plain):
    ranges = {"num_speculative_tokens_per_batch_size": [[1, 2, 4], [4, 4, 3]]}
    llm = self_drafting(toy_pair, speculative=ranges)
    params = [SamplingParams(max_tokens=count, **GREEDY) for count in (8, 20, 40, 60)]
    assert token_ids(generate(llm, toys.prompts(4), params)) == [
        token_ids(generate(plain, prompt, p))[0] for prompt, p in zip(toys.prompts(4), params, strict=True)
    ]
    assert llm.metrics.rounds > 20  # three of them decoded plainly for a while
    assert llm.metrics.acceptance_rate == 1.0


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_after_steps_without_drafts_that_take_more_than_one_pass_to_catch_up_with(toy_pair, plain, temperature):
    """Those who then draft ask for different numbers, so that rows leave between the passes."""
    ranges = {"num_speculative_tokens_per_batch_size": [[1, 3, 4]]}
    llm = self_drafting(toy_pair, speculative=ranges, max_num_batched_tokens=12)
    options = {"temperature": temperature, "seed": 3, "ignore_eos": True}
    params = [SamplingParams(max_tokens=count, **options) for count in (30, 60, 61, 62)]
    asked = [SamplingParams(max_tokens=p.max_tokens, extra_args={"num_speculative_tokens": k}, **options)
             for p, k in zip(params, (4, 1, 4, 2), strict=True)]  # fmt: skip
    expected = [token_ids(generate(plain, q, p))[0] for q, p in zip(toys.prompts(4), params, strict=True)]
    assert token_ids(generate(llm, toys.prompts(4), asked)) == expected
    assert llm.metrics.draft_tokens > 0
    assert llm.metrics.acceptance_rate == 1.0


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_under_penalties_for_tokens_that_are_only_drafted(toy_pair, plain, temperature):
    params = {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "presence_penalty": 1.0, "ignore_eos": True}
    llm = self_drafting(toy_pair)
    check(llm, plain, toys.prompts(4), SamplingParams(temperature=temperature, seed=2, max_tokens=40, **params))


def test_after_the_token_budget_has_cut_them(toy_pair, plain, monkeypatch):
    llm = self_drafting(toy_pair, k=5, max_num_seqs=4, max_num_batched_tokens=16)
    steps = watch_steps(llm, monkeypatch)
    prompts = [*toys.prompts(3, longest=3), *toys.prompts(2, shortest=60, longest=60)]
    check(llm, plain, prompts, SamplingParams(max_tokens=40, **GREEDY))
    cuts = [(entry.num_draft_tokens, drafted) for step in steps for entry, drafted in step]
    assert any(0 < k < drafted for k, drafted in cuts)
    assert any(k == 0 < drafted for k, drafted in cuts)


def test_after_they_have_given_their_blocks_to_others(toy_pair, plain, monkeypatch):
    """Nobody is preempted, and nobody waits, for the sake of drafts."""
    params = SamplingParams(max_tokens=16, **GREEDY)
    prompts = toys.prompts(3, shortest=14, longest=14)
    # Each grows to 30 tokens, 15 blocks of 2: all three of them fit, and nothing beside.
    llm = self_drafting(toy_pair, block_size=2, max_model_len=40, kv_cache_memory_bytes=45 * 2 * BYTES_PER_TOKEN)
    steps = watch_steps(llm, monkeypatch)
    check(llm, plain, prompts, params)
    assert llm.metrics.preemptions == 0
    assert all(len(step) == 3 for step in steps[1:3])


def test_a_draft_is_as_long_as_what_the_page_table_holds_of_it(toy_pair):
    """After each step: the target's KV ends before the last known token, the draft's before the last draft token."""
    llm = self_drafting(toy_pair, k=3, max_num_batched_tokens=24)
    for i, prompt in enumerate(toys.prompts(5)):
        llm.engine.add_request(str(i), prompt["prompt_token_ids"], SamplingParams(max_tokens=16, **GREEDY))
    num_drafts = 0
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
        for sequence in llm.engine.scheduler.running:
            lengths = sequence.page_table.context_lens
            if not sequence.output_token_ids:
                assert not sequence.draft
                assert lengths[DRAFT] == lengths[TARGET]
                continue
            assert lengths[TARGET] == sequence.num_tokens - 1
            if sequence.draft:
                num_drafts += 1
                assert lengths[DRAFT] == sequence.num_tokens + len(sequence.draft) - 1
                assert len(sequence.draft.logprobs) == len(sequence.draft)
                assert max(sequence.draft.logprobs) <= 0
    assert num_drafts > 10


def test_first_drafts_come_in_the_step_that_ends_a_prefill(toy_pair):
    llm = self_drafting(toy_pair, k=3, max_num_batched_tokens=16)
    llm.engine.add_request("r", toys.prompts(1, shortest=40, longest=40)[0]["prompt_token_ids"], SamplingParams())
    (sequence,) = llm.engine.requests["r"].sequences
    lengths = []
    while not sequence.output_token_ids:
        llm.engine.step()
        lengths.append(len(sequence.draft))
    assert lengths == [0, 0, 3]
