"""What the tests of the worker have in common: prompts, outputs, and a look into vLLM's engine."""

from __future__ import annotations

from specpaged.prompts import load_prompts

PROMPTS = [record.text for record in load_prompts(None)[:12]]


def token_ids(outputs):
    """Of every completion, in order."""
    return [list(completion.token_ids) for output in outputs for completion in output.outputs]


def core(llm):
    """vLLM's engine core, which runs in this process."""
    return llm.llm_engine.engine_core.engine_core


def model_runner(llm):
    """Our worker's."""
    return core(llm).model_executor.driver_worker.worker.model_runner


def check_nothing_is_held(llm):
    """All of vLLM's blocks but the null block are free, and what the worker keeps is sound."""
    model_runner(llm).check_integrity()
    pool = core(llm).scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
