"""Two ranks of vLLM's own executor on CPU, the target split between them: the tokens of one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from specpaged.config import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specpaged.vllm_plugin import WORKER_CLS
from tests.vllm_plugin.serving import PROMPTS, token_ids

GREEDY = {"temperature": 0, "max_tokens": 24}
SAMPLED = {"temperature": 0.9, "seed": 3, "max_tokens": 24}
SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    arguments, prompts, all_params = json.loads(sys.argv[1])
    llm = LLM(**arguments)
    for params in all_params:
        outputs = llm.generate(prompts, SamplingParams(**params), use_tqdm=False)
        print("OUT", json.dumps([list(output.outputs[0].token_ids) for output in outputs]), flush=True)
"""


def test_a_target_on_two_ranks_puts_out_the_tokens_of_one(make_vllm, tmp_path, monkeypatch):
    import vllm

    arguments = {
        "model": EMBEDDED_TARGET, "worker_cls": WORKER_CLS, "dtype": "float32", "max_model_len": 512,
        "max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20, "enforce_eager": True, "tensor_parallel_size": 2,
        "speculative_config": {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 4},
    }  # fmt: skip
    script = tmp_path / "two_ranks.py"
    script.write_text(SCRIPT)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    job = json.dumps([arguments, PROMPTS, [GREEDY, SAMPLED]])
    done = subprocess.run([sys.executable, script, job], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    greedy, sampled = (json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("OUT "))
    one = make_vllm(0)
    for outputs, params in ((greedy, GREEDY), (sampled, SAMPLED)):
        expected = one.generate(PROMPTS, vllm.SamplingParams(**params), use_tqdm=False)
        assert outputs == token_ids(expected)
