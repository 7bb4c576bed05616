"""The target split between two ranks of vLLM's executor: the tokens of one, by one call between processes a step."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from vllm.sampling_params import StructuredOutputsParams  # noqa: E402

from specpaged.config import EMBEDDED_DRAFT, EMBEDDED_TARGET  # noqa: E402
from specpaged.vllm_plugin import WORKER_CLS  # noqa: E402
from tests.vllm_plugin.serving import PROMPTS, token_ids  # noqa: E402

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
SCRIPT = """
import json, sys
from collections import Counter
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

def draft_always(worker):
    "Up to here it was decided anew in every step, on each rank by what it has measured itself."
    assert worker.model_runner.speculative_step.planner is not None
    worker.model_runner.speculative_step.planner = None

if __name__ == "__main__":
    arguments, prompts, greedy, sampled, choice = json.loads(sys.argv[1])
    llm = LLM(**arguments)
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    calls, collective_rpc = Counter(), executor.collective_rpc

    def counting(method, *arguments, **options):
        # While a grammar is compiled, for as long as that takes, steps run no tokens and sample none.
        if method != "execute_model" or options["args"][0].total_num_scheduled_tokens:
            calls[method] += 1
        return collective_rpc(method, *arguments, **options)

    executor.collective_rpc = counting

    def run(params):
        calls.clear()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs], dict(calls)

    found = [run(SamplingParams(**params)) for params in (greedy, sampled)]
    llm.collective_rpc(draft_always)
    grammar = StructuredOutputsParams(choice=choice)
    found += [run(SamplingParams(**greedy, structured_outputs=structured)) for structured in (None, grammar)]
    print("OUT", json.dumps(found), flush=True)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What two ranks put out in each of RUNS, and how often they were called by which name."""
    script = tmp_path_factory.mktemp("ranks") / "two_ranks.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, script, json.dumps([ARGUMENTS, PROMPTS, GREEDY, SAMPLED, CHOICE])],
        env=environment, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("OUT "))
    return dict(zip(RUNS, json.loads(line[4:]), strict=True))


@pytest.mark.parametrize("run", RUNS)
def test_a_target_on_two_ranks_puts_out_the_tokens_of_one(make_vllm, found, run):
    params = SAMPLED if run == "sampled" else GREEDY
    structured = StructuredOutputsParams(choice=CHOICE) if run == "under a grammar" else None
    params = vllm.SamplingParams(**params, structured_outputs=structured)
    assert found[run][0] == token_ids(make_vllm(0).generate(PROMPTS, params, use_tqdm=False))


@pytest.mark.parametrize("run", RUNS)
def test_a_step_is_one_call_and_two_with_a_grammar_and_brings_its_drafts(found, run):
    outputs, calls = found[run]
    num_steps = calls.pop("execute_model")
    if run == "drafting":  # plain steps bring eight tokens at most
        assert num_steps < 0.8 * sum(map(len, outputs)) / 8, "drafts have not come"
    assert calls == ({"sample_tokens": num_steps} if run == "under a grammar" else {})
