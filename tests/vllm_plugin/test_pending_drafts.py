"""Drafts are verified in the step after the one that made them: whatever vLLM's scheduler does in between.

The draft is the target itself, so that every draft token is right: one that is rejected was made from a wrong state.
"""

from __future__ import annotations

import pytest

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from specpaged.config import EMBEDDED_TARGET  # noqa: E402
from tests.vllm_plugin.serving import PROMPTS, check_nothing_is_held, core, model_runner, token_ids  # noqa: E402

DRAFT = {"method": "draft_model", "model": EMBEDDED_TARGET, "num_speculative_tokens": 4}
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
