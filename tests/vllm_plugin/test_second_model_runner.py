"""The shape of steps that vLLM plans for its second model runner, its default on CUDA: who resumes comes as new."""

from __future__ import annotations

import pytest

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from vllm.sampling_params import StructuredOutputsParams  # noqa: E402
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402

from tests.vllm_plugin.serving import PROMPTS, check_nothing_is_held, core, token_ids  # noqa: E402

GRAMMAR = StructuredOutputsParams(regex="[a-z]{12}")


@pytest.fixture(scope="module")
def params():
    return [
        vllm.SamplingParams(
            max_tokens=40, temperature=0.8 * (i % 2), seed=i, logprobs=1, structured_outputs=GRAMMAR if i < 3 else None
        )
        for i in range(len(PROMPTS))
    ]


@pytest.fixture(scope="module")
def expected(make_vllm, params):
    """What the first one puts out, by number of drafts."""
    return {k: make_vllm(k).generate(PROMPTS, params, use_tqdm=False) for k in (0, 4)}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize(
    "arguments",
    [{"num_gpu_blocks_override": 36}, {"enable_prefix_caching": True, "max_num_batched_tokens": 64}],
    ids=str,
)
def test_outputs_are_those_under_the_first_one(
    make_vllm, params, expected, second_model_runner, monkeypatch, request, is_async, k, arguments
):
    if is_async:
        request.getfixturevalue("asynchronous")
    preempted, preempt = [], Scheduler._preempt_request

    def counting(self, *positional, **options):
        preempted.append(1)
        return preempt(self, *positional, **options)

    monkeypatch.setattr(Scheduler, "_preempt_request", counting)
    llm = make_vllm(k, async_scheduling=is_async, **arguments)
    assert core(llm).scheduler.use_v2_model_runner
    assert isinstance(core(llm).scheduler, AsyncScheduler) == is_async
    for _ in range(2):  # the second time out of the cache, if there is one
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert token_ids(outputs) == token_ids(expected[k])
        for ours, first in zip(outputs, expected[k], strict=True):
            assert ours.outputs[0].logprobs == first.outputs[0].logprobs
    assert bool(preempted) == ("num_gpu_blocks_override" in arguments)
    assert any(output.num_cached_tokens for output in outputs) == ("enable_prefix_caching" in arguments)
    check_nothing_is_held(llm)
