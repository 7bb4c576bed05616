"""Where a process of its own runs the worker, a step is one call to it, which brings the drafts for the next one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from specpaged.config import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specpaged.vllm_plugin import WORKER_CLS
from tests.vllm_plugin.serving import PROMPTS, token_ids

CHOICE = ["paged attention", "padded attention"]
SCRIPT = """
import json, sys
from collections import Counter
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

if __name__ == "__main__":
    arguments, prompts, choice = json.loads(sys.argv[1])
    llm = LLM(**arguments)
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    calls, collective_rpc = Counter(), executor.collective_rpc

    def counting(method, *arguments, **options):
        # While a grammar is compiled, for as long as that takes, steps run no tokens and sample none.
        if method != "execute_model" or options["args"][0].total_num_scheduled_tokens:
            calls[method] += 1
        return collective_rpc(method, *arguments, **options)

    executor.collective_rpc = counting
    for structured in (None, StructuredOutputsParams(choice=choice)):
        calls.clear()
        params = SamplingParams(temperature=0, max_tokens=40, structured_outputs=structured)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        print("OUT", json.dumps([[list(output.outputs[0].token_ids) for output in outputs], calls]), flush=True)
"""


def test_a_step_is_one_call_and_two_with_a_grammar_and_brings_its_drafts(make_vllm, tmp_path, monkeypatch):
    arguments = {
        "model": EMBEDDED_TARGET, "worker_cls": WORKER_CLS, "dtype": "float32", "max_model_len": 512,
        "max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20, "enforce_eager": True, "disable_log_stats": True,
        "distributed_executor_backend": "mp", "additional_config": {"specpaged": {"adaptive": False}},
        "speculative_config": {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 4},
    }  # fmt: skip
    script = tmp_path / "own_process.py"
    script.write_text(SCRIPT)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    job = json.dumps([arguments, PROMPTS, CHOICE])
    done = subprocess.run([sys.executable, script, job], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("OUT ")]
    here = make_vllm(0)
    for structured, (outputs, calls) in zip((None, StructuredOutputsParams(choice=CHOICE)), lines, strict=True):
        params = SamplingParams(temperature=0, max_tokens=40, structured_outputs=structured)
        assert outputs == token_ids(here.generate(PROMPTS, params, use_tqdm=False))
        num_steps = calls.pop("execute_model")
        if structured is None:  # plain steps bring eight tokens at most
            assert num_steps < 0.8 * sum(map(len, outputs)) / 8, "drafts have not come"
        assert calls == ({} if structured is None else {"sample_tokens": num_steps})
