"""Asynchronous scheduling, which CUDA has by default: a step is planned before the one before it is verified."""

from __future__ import annotations

import pytest

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from vllm.sampling_params import StructuredOutputsParams  # noqa: E402
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402

from tests.vllm_plugin.serving import PROMPTS, check_nothing_is_held, core, token_ids  # noqa: E402

CHOICE = StructuredOutputsParams(choice=["paged attention", "padded attention"])
PARAMS = [
    {},
    {},
    {"temperature": 0.9, "seed": 4, "min_tokens": 3},
    {"structured_outputs": CHOICE},
    {"max_tokens": 600, "ignore_eos": True},  # up to max_model_len
]


def outputs(llm):
    """Of all prompts, once for each of PARAMS."""
    params = [vllm.SamplingParams(**({"temperature": 0, "max_tokens": 40} | of)) for of in PARAMS]
    return [token_ids(llm.generate(PROMPTS, of, use_tqdm=False)) for of in params]


@pytest.fixture(scope="module")
def expected(make_vllm):
    llm = make_vllm(0)
    assert not isinstance(core(llm).scheduler, AsyncScheduler)
    return outputs(llm)


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
def test_outputs_are_those_of_synchronous_scheduling(make_vllm, expected, asynchronous, k, arguments):
    llm = make_vllm(k, async_scheduling=True, **arguments)
    assert isinstance(core(llm).scheduler, AsyncScheduler)
    assert outputs(llm) == expected
    check_nothing_is_held(llm)
