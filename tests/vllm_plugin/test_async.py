"""Asynchronous scheduling, which CUDA has by default: a step is planned before the one before it is verified."""

from __future__ import annotations

import pytest

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from vllm.sampling_params import StructuredOutputsParams  # noqa: E402
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402

from tests.vllm_plugin.serving import PROMPTS, check_nothing_is_held, core, token_ids  # noqa: E402

GREEDY = {"temperature": 0, "max_tokens": 40}


def generate(llm, **params):
    return llm.generate(PROMPTS, vllm.SamplingParams(**(GREEDY | params)), use_tqdm=False)


@pytest.mark.parametrize(
    ("k", "arguments"),
    [
        (0, {}),
        (4, {}),
        (4, {"max_num_batched_tokens": 64}),
        (4, {"num_gpu_blocks_override": 36}),
        (4, {"enable_prefix_caching": True}),
    ],
    ids=str,
)
def test_outputs_are_those_of_synchronous_scheduling(make_vllm, asynchronous, request, k, arguments):
    llm = make_vllm(k, async_scheduling=True, **arguments)
    assert isinstance(core(llm).scheduler, AsyncScheduler)
    choice = StructuredOutputsParams(choice=["paged attention", "padded attention"])
    outputs = [
        token_ids(generate(llm)),
        token_ids(generate(llm)),
        token_ids(generate(llm, temperature=0.9, seed=4, min_tokens=3)),
        token_ids(generate(llm, structured_outputs=choice)),
        token_ids(generate(llm, max_tokens=600, ignore_eos=True)),
    ]
    check_nothing_is_held(llm)
    request.getfixturevalue("monkeypatch").undo()
    llm = make_vllm(0)
    assert not isinstance(core(llm).scheduler, AsyncScheduler)
    assert outputs == [
        token_ids(generate(llm)),
        token_ids(generate(llm)),
        token_ids(generate(llm, temperature=0.9, seed=4, min_tokens=3)),
        token_ids(generate(llm, structured_outputs=choice)),
        token_ids(generate(llm, max_tokens=600, ignore_eos=True)),
    ]
