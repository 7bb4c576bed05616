"""The target split between two ranks of vLLM's executor: the tokens of one, by one call between processes a step."""

from __future__ import annotations

from collections import Counter

import pytest

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from vllm.sampling_params import StructuredOutputsParams  # noqa: E402

from specpaged.config import EMBEDDED_DRAFT, EMBEDDED_TARGET  # noqa: E402
from specpaged.vllm_plugin import WORKER_CLS  # noqa: E402
from tests.vllm_plugin.serving import PROMPTS, core, token_ids  # noqa: E402

CHOICE = ["paged attention", "padded attention"]
GREEDY = {"temperature": 0, "max_tokens": 24}
SAMPLED = {"temperature": 0.9, "seed": 3, "max_tokens": 24}
RUNS = ["greedy", "sampled", "drafting", "under a grammar"]
ARGUMENTS = {
    "model": EMBEDDED_TARGET, "worker_cls": WORKER_CLS, "dtype": "float32", "max_model_len": 512,
    "max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20, "enforce_eager": True, "disable_log_stats": True,
    "tensor_parallel_size": 2,
    "speculative_config": {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 4},
}  # fmt: skip


def draft_always(worker):
    """Up to here it was decided anew in every step, on each rank by what it has measured itself."""
    assert worker.model_runner.speculative_step.planner is not None
    worker.model_runner.speculative_step.planner = None


@pytest.fixture(scope="module")
def found():
    """What two ranks put out in each of RUNS, and how often they were called by which name.

    Each rank is a process that imports vLLM; who calls them is this one, which has.
    """
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        environment.delenv("TRITON_INTERPRET", raising=False)
        llm = vllm.LLM(**ARGUMENTS)
    executor = core(llm).model_executor
    calls, collective_rpc = Counter(), executor.collective_rpc

    def counting(method, *arguments, **options):
        # While a grammar is compiled, for as long as that takes, steps run no tokens and sample none.
        if method != "execute_model" or options["args"][0].total_num_scheduled_tokens:
            calls[method] += 1
        return collective_rpc(method, *arguments, **options)

    executor.collective_rpc = counting

    def run(of):
        calls.clear()
        return token_ids(llm.generate(PROMPTS, sampling_params(of), use_tqdm=False)), dict(calls)

    try:
        results = {of: run(of) for of in ("greedy", "sampled")}
        llm.collective_rpc(draft_always)
        return results | {of: run(of) for of in ("drafting", "under a grammar")}
    finally:
        core(llm).shutdown()


def sampling_params(run):
    structured = StructuredOutputsParams(choice=CHOICE) if run == "under a grammar" else None
    return vllm.SamplingParams(**(SAMPLED if run == "sampled" else GREEDY), structured_outputs=structured)


@pytest.mark.parametrize("run", RUNS)
def test_a_target_on_two_ranks_puts_out_the_tokens_of_one(make_vllm, found, run):
    assert found[run][0] == token_ids(make_vllm(0).generate(PROMPTS, sampling_params(run), use_tqdm=False))


@pytest.mark.parametrize("run", RUNS)
def test_a_step_is_one_call_and_two_with_a_grammar_and_brings_its_drafts(found, run):
    outputs, calls = found[run]
    num_steps = calls.pop("execute_model")
    if run == "drafting":  # plain steps bring eight tokens at most
        assert num_steps < 0.8 * sum(map(len, outputs)) / 8, "drafts have not come"
    assert calls == ({"sample_tokens": num_steps} if run == "under a grammar" else {})
