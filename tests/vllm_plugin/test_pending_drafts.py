"""Drafts are verified in the step after the one that made them: whatever vLLM's scheduler does in between.

The draft is the target itself, so that every draft token is right: one that is rejected was made from a wrong state.
"""

from __future__ import annotations

import pytest

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from specpaged.config import EMBEDDED_TARGET  # noqa: E402
from tests.vllm_plugin.serving import PROMPTS, check_nothing_is_held, core, model_runner, token_ids  # noqa: E402

DRAFT = {"method": "draft_model", "model": EMBEDDED_TARGET, "num_speculative_tokens": 4}
COUNTS = (
    "steps",
    "rounds",
    "emitted_tokens",
    "drafts",
    "draft_tokens",
    "accepted_tokens",
    "proposed_tokens",
    "rollbacks",
)
BLOCK_BYTES = 2 * 16 * 8 * 2 * 4 * 32 * 4  # of two pools: 16 tokens, 8 layers, 4 heads of 32 dimensions


@pytest.mark.parametrize(
    "arguments",
    [
        {"kv_cache_memory_bytes": 40 * BLOCK_BYTES},
        {"enable_prefix_caching": True, "max_num_seqs": 2},
        {"max_num_batched_tokens": 64, "max_num_seqs": 4},
        {"speculative_config": DRAFT | {"num_speculative_tokens_per_batch_size": [[1, 2, 4], [3, 6, 0], [7, 8, 2]]}},
    ],
    ids=["preemption", "cache hits", "chunks", "steps without drafts"],
)
def test_drafts_made_last_lose_nothing(make_vllm, arguments):
    options = {"draft_numerics": "exact", "adaptive": False}
    exact = {"additional_config": {"specpaged": options}, "speculative_config": DRAFT}
    llm = make_vllm(0, **(exact | arguments))
    params = [vllm.SamplingParams(temperature=0, max_tokens=20 + 9 * i, ignore_eos=True) for i in range(len(PROMPTS))]
    expected = token_ids(make_vllm(0).generate(PROMPTS, params, use_tqdm=False))
    preemptions = []
    preempt = core(llm).scheduler._preempt_request

    def noting(request, *others, **options):
        preemptions.append(request.request_id)
        return preempt(request, *others, **options)

    core(llm).scheduler._preempt_request = noting
    for _ in range(2):
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert token_ids(outputs) == expected
    if "kv_cache_memory_bytes" in arguments:
        assert preemptions
    if "enable_prefix_caching" in arguments:
        assert sum(output.num_cached_tokens for output in outputs) > 0
    metrics = model_runner(llm).metrics
    assert metrics.draft_tokens > 200
    assert metrics.acceptance_rate == 1.0
    check_nothing_is_held(llm)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"max_model_len": 224},
        {"enable_prefix_caching": True},
        {"max_num_batched_tokens": 64},
        {"async": True},
    ],
    ids=str,
)
def test_drafts_made_in_one_call_with_the_pass_are_those_of_a_proposal(make_vllm, request, arguments):
    """Whoever ends by a stop, by its length or by the model's; and so is all that is counted."""
    if arguments.pop("async", False):
        request.getfixturevalue("asynchronous")
        arguments = {"async_scheduling": True}
    llm = make_vllm(3, **arguments)
    params = [
        vllm.SamplingParams(temperature=0, max_tokens=15 + 7 * i, ignore_eos=i % 2 > 0) for i in range(len(PROMPTS))
    ]
    params[1] = vllm.SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[11, 13, 30], min_tokens=5)
    step = model_runner(llm).speculative_step
    rounds, in_one_call = step.target.rounds, []
    step.target.rounds = lambda *args: in_one_call.append(1) or rounds(*args)
    told = []
    for reserve_rounds in (None, step.reserve_rounds):
        step.reserve_rounds = reserve_rounds
        before = {name: getattr(step.metrics, name) for name in COUNTS}
        outputs = token_ids(llm.generate(PROMPTS, params, use_tqdm=False))
        told.append((outputs, {name: getattr(step.metrics, name) - before[name] for name in COUNTS}))
        assert bool(in_one_call) == (reserve_rounds is not None)
    assert told[0] == told[1]
    check_nothing_is_held(llm)
