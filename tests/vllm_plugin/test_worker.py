"""vLLM with our worker: a request cannot tell, from its tokens, how it was run."""

from __future__ import annotations

import pytest

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402

import specpaged  # noqa: E402
from tests.vllm_plugin.serving import PROMPTS, check_nothing_is_held, model_runner, token_ids  # noqa: E402

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
GREEDY = {"temperature": 0, "max_tokens": 40}


def generate(llm, **params):
    return llm.generate(PROMPTS, vllm.SamplingParams(**(GREEDY | params)), use_tqdm=False)


@pytest.fixture(scope="module")
def standalone():
    """What the project's own engine puts out, and what it decodes without drafts."""
    engines = [
        specpaged.LLM(max_model_len=512, max_num_seqs=8),
        specpaged.LLM(max_model_len=512, max_num_seqs=8, speculative_config={"num_speculative_tokens": 0}),
    ]
    params = specpaged.SamplingParams(**GREEDY)
    speculative, plain = (
        [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)] for llm in engines
    )
    assert speculative == plain
    return plain


@pytest.mark.parametrize(
    ("k", "arguments"),
    [
        (0, {}),
        (1, {}),
        (4, {}),
        (7, {}),
        (4, {"block_size": 64}),
        (4, {"max_num_batched_tokens": 64}),
        (4, {"max_num_seqs": 1}),
        (0, {"speculative_config": NGRAM}),
        (4, {"scheduling_policy": "priority"}),
    ],
    ids=str,
)
def test_outputs_are_those_of_the_projects_own_engine(make_vllm, standalone, k, arguments):
    llm = make_vllm(k, **arguments)
    assert token_ids(generate(llm)) == standalone
    generate(llm, max_tokens=1)  # a step later what has ended is forgotten
    check_nothing_is_held(llm)
    assert len(model_runner(llm).sequences) <= 8


@pytest.mark.parametrize("k", [0, 4])
def test_a_preempted_request_comes_out_the_same(make_vllm, standalone, monkeypatch, k):
    preempted = []
    preempt = Scheduler._preempt_request

    def counting(self, request, *arguments, **options):
        preempted.append(request.request_id)
        return preempt(self, request, *arguments, **options)

    monkeypatch.setattr(Scheduler, "_preempt_request", counting)
    llm = make_vllm(k, num_gpu_blocks_override=36)
    assert token_ids(generate(llm)) == standalone
    assert preempted
    check_nothing_is_held(llm)


@pytest.mark.parametrize("k", [0, 4])
def test_cached_prefixes_change_nothing(make_vllm, standalone, k):
    llm = make_vllm(k, enable_prefix_caching=True)
    first, second = generate(llm), generate(llm)
    assert token_ids(first) == token_ids(second) == standalone
    assert sum(output.num_cached_tokens for output in second) > sum(output.num_cached_tokens for output in first)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.8, "seed": 11},
        {"temperature": 1.0, "seed": 3, "n": 2, "top_p": 0.9, "top_k": 40},
        {"temperature": 0.7, "seed": 5, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
        {"temperature": 0.9, "seed": 7, "bad_words": ["the", "of"], "min_tokens": 12},
        {"temperature": 0.9, "seed": 7, "allowed_token_ids": list(range(5, 200))},
        {"stop": ["e "], "min_tokens": 3},
        {"stop_token_ids": [101, 110], "min_tokens": 4},
        {"max_tokens": 1},
        {"max_tokens": 600, "ignore_eos": True},  # up to max_model_len
    ],
    ids=str,
)
def test_speculation_does_not_show_in_what_is_sampled(make_vllm, params):
    plain, speculative = generate(make_vllm(0), **params), generate(make_vllm(4), **params)
    assert token_ids(speculative) == token_ids(plain)
    for ours, theirs in zip(speculative, plain, strict=True):
        for a, b in zip(ours.outputs, theirs.outputs, strict=True):
            assert (a.text, a.finish_reason, a.stop_reason) == (b.text, b.finish_reason, b.stop_reason)


def test_a_request_chooses_how_many_tokens_are_drafted(make_vllm, standalone):
    llm = make_vllm(4)
    params = [
        vllm.SamplingParams(**GREEDY, extra_args=None if i % 3 == 0 else {"num_speculative_tokens": i % 3 * 2 - 2})
        for i in range(len(PROMPTS))
    ]
    assert token_ids(llm.generate(PROMPTS, params, use_tqdm=False)) == standalone


@pytest.mark.parametrize("k", [0, 4])
def test_log_probabilities_are_those_of_the_target(make_vllm, k):
    """Of the first output token and of the prompt's last one: of one pass each, without drafts before it."""
    outputs = generate(make_vllm(k), logprobs=2, prompt_logprobs=1, max_tokens=12)
    expected = generate(make_vllm(0), logprobs=2, prompt_logprobs=1, max_tokens=12)
    for output, other in zip(outputs, expected, strict=True):
        assert output.outputs[0].logprobs == other.outputs[0].logprobs
        assert output.prompt_logprobs == other.prompt_logprobs
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
        for token_id, of_token in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
            assert of_token[token_id].rank == 1
            assert len(of_token) == 2
