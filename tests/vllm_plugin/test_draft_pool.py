"""Blocks that vLLM caches hold the draft's KV, too: a request that finds them is drafted for as if it had run."""

from __future__ import annotations

import pytest

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from transformers import AutoConfig  # noqa: E402

from specpaged.config import EMBEDDED_TARGET  # noqa: E402
from specpaged.testing.heads import write_clover, write_eagle3  # noqa: E402
from tests.vllm_plugin.serving import PROMPTS, core, model_runner, token_ids  # noqa: E402

PREFIX = PROMPTS[0] * 3
GREEDY = vllm.SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def make_with_heads(make_vllm, tmp_path_factory):
    """Engines that draft 3 tokens by heads with random weights, of a method."""
    config, paths = AutoConfig.from_pretrained(EMBEDDED_TARGET), {}

    def make(method, adaptive=False, **arguments):
        if method not in paths:
            write = write_eagle3 if method == "eagle3" else write_clover
            paths[method] = str(write(tmp_path_factory.mktemp(method), config))
        speculative = {"method": method, "model": paths[method]}
        if method == "clover":
            speculative = {"method": "custom_class", "model": f"clover:{paths[method]}"}
        fixed = {"specpaged": {"adaptive": adaptive, "draft_numerics": "exact"}}
        speculative["num_speculative_tokens"] = 3
        return make_vllm(speculative_config=speculative, additional_config=fixed, max_num_seqs=4, **arguments)

    return make


def proposals(llm, prompts):
    """The outputs, and what was drafted behind which tokens."""
    runner, found = model_runner(llm), {}
    take_drafts = runner.take_drafts

    def noting():
        found.update({tuple(s.token_ids): tuple(s.draft.token_ids) for s in runner.sequences if s.draft})
        return take_drafts()

    runner.take_drafts = noting
    try:
        return llm.generate(prompts, GREEDY, use_tqdm=False), found
    finally:
        runner.take_drafts = take_drafts


def drafting_prompts(outputs, found):
    """Of these outputs' prompts, those behind which something was drafted."""
    prompts = [tuple(output.prompt_token_ids) for output in outputs]
    return {prompt for prompt in prompts if any(ids[: len(prompt)] == prompt for ids in found)}


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


@pytest.mark.parametrize("num_batched_tokens", [512, 64])
def test_of_those_that_share_a_prefix_in_one_step_all_draft_with_heads_as_if_each_had_run_it(
    make_with_heads, num_batched_tokens
):
    """What the others have not run, and have no hidden states of, the heads have run for the first one."""
    prompts = [PREFIX, PREFIX + "!", PREFIX + "?", PREFIX]
    chunks = {"max_num_batched_tokens": num_batched_tokens}
    llm = make_with_heads("eagle3", enable_prefix_caching=True, **chunks)
    core(llm).scheduler.reset_prefix_cache()
    outputs, found = proposals(llm, prompts)
    assert all(output.num_cached_tokens > 0 for output in outputs[1:])
    expected, of_cold = proposals(make_with_heads("eagle3", **chunks), prompts)
    assert token_ids(outputs) == token_ids(expected)
    assert found == of_cold
    assert len(found) >= 3 * 20


def test_clovers_heads_draft_for_each_of_them_too(make_with_heads):
    llm = make_with_heads("clover", enable_prefix_caching=True)
    core(llm).scheduler.reset_prefix_cache()
    prompts = [PREFIX, PREFIX + "!", PREFIX + "?"]
    outputs, found = proposals(llm, prompts)
    assert all(output.num_cached_tokens > 0 for output in outputs[1:])
    assert len(drafting_prompts(outputs[1:], found)) == 2
    assert token_ids(outputs) == token_ids(make_with_heads("clover").generate(prompts, GREEDY, use_tqdm=False))


def test_where_heads_fail_on_a_prefix_nobody_who_shares_it_drafts_and_outputs_stay(make_with_heads, monkeypatch):
    llm = make_with_heads("eagle3", enable_prefix_caching=True, max_num_batched_tokens=512)
    core(llm).scheduler.reset_prefix_cache()
    step = model_runner(llm).speculative_step
    num_failed = step.metrics.failed_proposals
    with monkeypatch.context() as failing:
        failing.setattr(step.drafter, "propose", None)
        failed = llm.generate([PREFIX, PREFIX + "!"], vllm.SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    assert failed[1].num_cached_tokens > 0
    assert step.metrics.failed_proposals > num_failed
    prompts = [PREFIX, PREFIX + "!", PROMPTS[3]]
    outputs, found = proposals(llm, prompts)
    assert outputs[0].num_cached_tokens > 0
    assert drafting_prompts(outputs, found) == {tuple(outputs[2].prompt_token_ids)}
    cold = make_with_heads("eagle3", max_num_batched_tokens=512)
    assert token_ids(outputs) == token_ids(cold.generate(prompts, GREEDY, use_tqdm=False))


def test_who_goes_on_behind_one_that_was_given_up_drafts_no_more_and_others_draft_as_ever(make_with_heads):
    """Its output has no KV of the heads, in blocks that vLLM shares: nothing is read there, or counted."""
    llm = make_with_heads("eagle3", enable_prefix_caching=True, max_num_batched_tokens=512)
    core(llm).scheduler.reset_prefix_cache()
    runner, cold = model_runner(llm), make_with_heads("eagle3", max_num_batched_tokens=512)
    for layer in runner.speculative_step.drafter.runner.kv_cache.layers:
        layer[:] = float("nan")
    execute = runner.execute

    def giving_up(scheduled):
        for sequence in runner.sequences:
            if len(sequence.output_token_ids) > 3:
                sequence.max_draft_tokens = 0  # as engine/followers.py does
        return execute(scheduled)

    runner.execute = giving_up
    params = vllm.SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    [given_up] = llm.generate([PREFIX], params, use_tqdm=False)
    runner.execute = execute
    prompt, metrics = given_up.prompt_token_ids, runner.metrics
    counts = [metrics.drafts, metrics.draft_tokens, metrics.accepted_tokens, metrics.proposed_tokens]
    behind = [{"prompt_token_ids": [*prompt, *given_up.outputs[0].token_ids]}]
    outputs, found = proposals(llm, behind)
    assert outputs[0].num_cached_tokens > len(prompt) + 16
    assert not found
    assert counts == [metrics.drafts, metrics.draft_tokens, metrics.accepted_tokens, metrics.proposed_tokens]
    assert token_ids(outputs) == token_ids(cold.generate(behind, GREEDY, use_tqdm=False))
    beside = [{"prompt_token_ids": [*prompt, 5, 6, 7]}]
    outputs, found = proposals(llm, beside)
    assert outputs[0].num_cached_tokens > 0
    expected, of_cold = proposals(cold, beside)
    assert token_ids(outputs) == token_ids(expected)
    assert found == of_cold
    assert len(found) > 15


@pytest.mark.parametrize("adaptive", [False, True])
def test_of_who_does_not_draft_heads_read_the_prompt_alone_and_who_shares_it_drafts(
    make_with_heads, monkeypatch, adaptive
):
    """Its outputs cost what plain decoding does: of them the target has no hidden states to show."""
    llm = make_with_heads("eagle3", adaptive, enable_prefix_caching=True, max_num_batched_tokens=512)
    core(llm).scheduler.reset_prefix_cache()
    step, num_read = model_runner(llm).speculative_step, []
    propose, run_target = step.drafter.propose, step._run_target

    def counting(rows, *others):
        num_read.append(sum(len(row.token_ids) for row in rows))
        return propose(rows, *others)

    def seeing(entries, argmax):
        of_step = run_target(entries, argmax)
        assert not of_step.hidden_states or any(entry.in_prefill for entry in entries)
        return of_step

    with monkeypatch.context() as refusing:
        refusing.setattr("specpaged.vllm_plugin.model_runner.admits", lambda planner: False)
        refusing.setattr(step.drafter, "propose", counting)
        refusing.setattr(step, "_run_target", seeing)
        [refused] = llm.generate([PREFIX], GREEDY, use_tqdm=False)
    assert num_read == [len(refused.prompt_token_ids) + 1]  # the token that follows, which the last pair is of
    assert len(refused.outputs[0].token_ids) > 4
    if not adaptive:
        outputs, found = proposals(llm, [PREFIX + "!"])
        assert outputs[0].num_cached_tokens > 0
        assert len(found) > 15


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
