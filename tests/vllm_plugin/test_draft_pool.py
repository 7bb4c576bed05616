"""Blocks that vLLM caches hold the draft's KV, too: a request that finds them is drafted for as if it had run."""

from __future__ import annotations

import pytest

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from tests.vllm_plugin.serving import PROMPTS, core, model_runner, token_ids  # noqa: E402

PREFIX = PROMPTS[0] * 3


def count_passes(llm, generate):
    """What `generate` returns, and the steps that it took: the more drafts are accepted, the fewer."""
    runner, passes = model_runner(llm), []
    execute = runner.execute

    def counting(scheduled):
        passes.append(scheduled.total_num_scheduled_tokens)
        return execute(scheduled)

    runner.execute = counting
    try:
        return generate(), len(passes)
    finally:
        runner.execute = execute


@pytest.mark.parametrize("opted_out", [False, True], ids=["drafted for", "opted out"])
def test_a_draft_fares_as_well_on_cached_blocks_as_on_its_own(make_vllm, opted_out):
    """Whoever filled them: even a request that is not drafted for."""
    llm = make_vllm(4, enable_prefix_caching=True, max_num_seqs=4)
    core(llm).scheduler.reset_prefix_cache()
    greedy = vllm.SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    first = vllm.SamplingParams(
        temperature=0, max_tokens=32, ignore_eos=True, extra_args={"num_speculative_tokens": 0 if opted_out else 4}
    )
    cold = make_vllm(4, max_num_seqs=4)
    expected = count_passes(cold, lambda: cold.generate([PREFIX], greedy, use_tqdm=False))
    (filled,) = llm.generate([PREFIX], first, use_tqdm=False)
    assert filled.num_cached_tokens == 0
    outputs, passes = count_passes(llm, lambda: llm.generate([PREFIX], greedy, use_tqdm=False))
    assert outputs[0].num_cached_tokens >= len(filled.prompt_token_ids) - 16
    assert token_ids(outputs) == token_ids(expected[0])
    assert passes == expected[1]


def test_requests_that_share_a_prefix_in_one_step_find_it_in_both_pools(make_vllm):
    """vLLM hashes blocks when it hands them out: the second request is to find what the first computes beside it."""
    llm = make_vllm(4, enable_prefix_caching=True, max_num_seqs=4)
    core(llm).scheduler.reset_prefix_cache()
    greedy = vllm.SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    outputs, passes = count_passes(llm, lambda: llm.generate([PREFIX, PREFIX + "!"], greedy, use_tqdm=False))
    assert outputs[1].num_cached_tokens > 0
    cold = make_vllm(4, max_num_seqs=4)
    expected, of_cold = count_passes(cold, lambda: cold.generate([PREFIX, PREFIX + "!"], greedy, use_tqdm=False))
    assert token_ids(outputs) == token_ids(expected)
    assert passes == of_cold


def test_slots_that_nobody_owns_are_never_read(make_vllm):
    """NaN in all of both pools before the first request."""
    llm = make_vllm(4, block_size=32)
    runner = model_runner(llm)
    for cache in (runner.speculative_step.target.kv_cache, runner.speculative_step.drafter.runner.kv_cache):
        for layer in cache.layers:
            layer[cache.block_size :] = float("nan")
    greedy = vllm.SamplingParams(temperature=0, max_tokens=32)
    outputs = llm.generate(PROMPTS, greedy, use_tqdm=False)
    plain = make_vllm(0).generate(PROMPTS, greedy, use_tqdm=False)
    assert token_ids(outputs) == token_ids(plain)


def test_a_draft_follows_a_prompt_in_the_targets_chunks(make_vllm):
    """Not all at once behind the last one: no step runs more tokens of it than it may have."""
    llm = make_vllm(4, max_num_batched_tokens=64, max_num_seqs=4)
    drafter, steps = model_runner(llm).speculative_step.drafter, []
    propose = drafter.propose

    def noting(rows, sampling, stop_rule=None):
        steps.append(sum(len(row.token_ids) for row in rows))
        return propose(rows, sampling)

    drafter.propose = noting
    params = vllm.SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    llm.generate({"prompt_token_ids": [5 + i % 200 for i in range(300)]}, params, use_tqdm=False)
    drafter.propose = propose
    assert sum(steps) >= 300
    assert max(steps) <= 64 + 4
