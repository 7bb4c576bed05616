"""Decoding one at a time: the same in several processes as in one."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from specpaged import LLM, SamplingParams
from specpaged.comparison.one_at_a_time import MAX_WEIGHT_BYTES, MIN_PROMPTS, decode, num_processes
from specpaged.comparison.reference import PlainReference
from tests import toys


def test_processes_decode_what_one_decodes(toy_pair):
    llm = LLM(toy_pair.target, speculative_config={"model": toy_pair.draft}, max_model_len=64)
    prompts = [prompt["prompt_token_ids"] for prompt in toys.prompts(5, longest=20)]
    params = [SamplingParams(temperature=t, seed=7, max_tokens=6) for t in (0.0, 0.8, 0.0, 1.0, 0.0)]
    expected = decode(partial(PlainReference, llm), prompts, params, processes=1)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    assert expected == [output.outputs[0].token_ids for output in outputs]
    make = partial(PlainReference.of, llm.config)
    assert decode(make, prompts, params, processes=2) == expected


@pytest.mark.parametrize("schedule", ["overlap", "auto"])
def test_what_is_drafted_beside_verification_is_compared_with_plain_decoding(toy_pair, schedule):
    llm = LLM(toy_pair.target, speculative_config={"model": toy_pair.draft}, max_model_len=64, schedule=schedule)
    [prompt] = [prompt["prompt_token_ids"] for prompt in toys.prompts(1, longest=20)]
    params = SamplingParams(temperature=0.0, max_tokens=6)
    [output] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    assert PlainReference.of(llm.config).generate(prompt, params) == output.outputs[0].token_ids


@pytest.mark.parametrize(("processes", "prompt"), [(2, [1]), (1, [1]), (1, [1] * 64)])
def test_what_fails_in_loading_or_decoding_comes_through_as_itself(toy_pair, processes, prompt):
    target = toy_pair.target if len(prompt) > 1 else "/nowhere/at/all"
    error = "max_model_len" if len(prompt) > 1 else "model '/nowhere/at/all' does not exist"
    make = partial(PlainReference.of, replace(LLM(toy_pair.target, max_model_len=64).config, model=target))
    with pytest.raises(ValueError, match=error):
        decode(make, [prompt], [SamplingParams(max_tokens=1)], processes=processes)


@pytest.mark.parametrize(
    ("num_prompts", "weight_bytes", "device", "expected"),
    [
        (480, 10**6, "cpu", 4),
        (MIN_PROMPTS - 1, 10**6, "cpu", 1),
        (2 * MIN_PROMPTS, 10**6, "cpu", 2),
        (480, MAX_WEIGHT_BYTES // 3, "cpu", 3),
        (480, 10 * MAX_WEIGHT_BYTES, "cpu", 1),
        (480, 10**6, "cuda", 1),
    ],
)
def test_there_are_as_many_processes_as_cores_prompts_and_memory_allow(
    monkeypatch, num_prompts, weight_bytes, device, expected
):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)), raising=False)
    assert num_processes(num_prompts, weight_bytes, torch.device(device)) == expected
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)
    assert num_processes(num_prompts, weight_bytes, torch.device(device)) == 1
