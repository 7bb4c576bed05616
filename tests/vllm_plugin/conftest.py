"""Engines of vLLM with our worker, in this process, made once for each configuration and file."""

from __future__ import annotations

import os

import pytest

# Read by vLLM on import.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from specpaged.config import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specpaged.vllm_plugin import WORKER_CLS

KV_BYTES = 96 << 20


@pytest.fixture(scope="module")
def make_vllm():
    """vLLM engines by their arguments; `k` speculates with the embedded draft, always with that many tokens."""
    from vllm import LLM

    engines = {}

    def make(k=0, **arguments):
        key = (k, *sorted((name, str(value)) for name, value in arguments.items()))
        if key not in engines:
            defaults = {
                "model": EMBEDDED_TARGET,
                "worker_cls": WORKER_CLS,
                "dtype": "float32",
                "max_model_len": 512,
                "max_num_seqs": 8,
                "block_size": 16,
                "kv_cache_memory_bytes": KV_BYTES,
                "enable_prefix_caching": False,
                "enforce_eager": True,
                "disable_log_stats": True,
            }
            if k:
                draft = {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": k}
                defaults["speculative_config"] = draft
                defaults["additional_config"] = {"specpaged": {"adaptive": False}}
            engines[key] = LLM(**(defaults | arguments))
        return engines[key]

    return make


@pytest.fixture
def asynchronous(monkeypatch):
    """vLLM's CPU platform turns asynchronous scheduling off, which is all that keeps it from it."""
    from vllm.platforms import current_platform

    cls = type(current_platform)
    check = cls.check_and_update_config.__func__

    def keep(platform, config):
        check(platform, config)
        config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(cls, "check_and_update_config", classmethod(keep))


@pytest.fixture
def second_model_runner(monkeypatch):
    """vLLM plans steps for its second model runner, which without a GPU it does not believe in."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
