"""How much is drafted is decided in every step under vLLM, too: outputs never depend on it."""

from __future__ import annotations

import pytest

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from specpaged.config import EMBEDDED_TARGET  # noqa: E402
from tests.engine.test_decisions import Whim, planner_of  # noqa: E402
from tests.engine.test_glances import Glancer  # noqa: E402
from tests.vllm_plugin.serving import PROMPTS, check_nothing_is_held, core, model_runner, token_ids  # noqa: E402

ADAPTIVE = {"specpaged": {"adaptive": True}}
BLOCK_BYTES = (8 * 2 * 4 * 32 + 4 * 2 * 2 * 16) * 16 * 4  # of both pools of the embedded pair: 16 tokens


def params():
    return [
        vllm.SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=12 + 7 * i, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]


def test_by_default_it_is_decided_up_to_the_number_that_was_asked_for(make_vllm):
    llm = make_vllm(4, additional_config={})
    step = model_runner(llm).speculative_step
    assert step.planner is not None
    assert model_runner(llm).sequences.max_draft_tokens == 4
    outputs = llm.generate(PROMPTS, params(), use_tqdm=False)
    assert token_ids(outputs) == token_ids(make_vllm(0).generate(PROMPTS, params(), use_tqdm=False))
    assert len(step.metrics.accepted_per_position) <= 4
    check_nothing_is_held(llm)
    assert "passes of 1 8 32 128 rows" in llm.collective_rpc("draft_costs")[0]
    assert model_runner(make_vllm(4)).speculative_step.planner is None
    assert make_vllm(4).collective_rpc("draft_costs") == ["None"]


@pytest.mark.parametrize(
    "arguments",
    [{}, {"enable_prefix_caching": True}, {"kv_cache_memory_bytes": 40 * BLOCK_BYTES}, {"max_num_batched_tokens": 64}],
    ids=["", "cache hits", "preemption", "chunks"],
)
def test_outputs_do_not_depend_on_what_is_decided(make_vllm, arguments):
    llm = make_vllm(4, additional_config=ADAPTIVE, **arguments)
    step = model_runner(llm).speculative_step
    whim = Whim(3)
    step.planner = planner_of(whim)
    expected = token_ids(make_vllm(0).generate(PROMPTS, params(), use_tqdm=False))
    for _ in range(2):  # the second time, prompts may be found in the cache
        assert token_ids(llm.generate(PROMPTS, params(), use_tqdm=False)) == expected
        check_nothing_is_held(llm)
    assert step.metrics.draft_tokens > 100
    assert whim.num_looks > 0
    if "kv_cache_memory_bytes" in arguments:
        assert core(llm).scheduler.kv_cache_manager.block_pool.num_gpu_blocks < 50


@pytest.mark.parametrize("caches", [False, True])
def test_nothing_is_left_of_a_glance_and_who_drafts_later_catches_up_over_it(make_vllm, caches):
    """In blocks behind the prompt that nobody else holds; a mate of the same text finds them in the cache later."""
    draft = {"method": "draft_model", "model": EMBEDDED_TARGET, "num_speculative_tokens": 3}
    config = {"specpaged": {"adaptive": True, "draft_numerics": "exact"}}
    arguments = {"speculative_config": draft, "additional_config": config, "enable_prefix_caching": caches}
    llm = make_vllm(**arguments)
    step, glancer = model_runner(llm).speculative_step, Glancer(drafts_after=120)
    step.planner = planner_of(glancer)
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[0]]
    asked = vllm.SamplingParams(temperature=0, max_tokens=140, ignore_eos=True)
    expected = token_ids(make_vllm(0).generate(prompts, asked, use_tqdm=False))
    for _ in range(2):
        assert token_ids(llm.generate(prompts, asked, use_tqdm=False)) == expected
        check_nothing_is_held(llm)
    assert glancer.num_glances > 10
    assert step.metrics.failed_proposals == 0
    assert step.metrics.acceptance_rate == 1.0
    assert step.metrics.draft_tokens > 100
