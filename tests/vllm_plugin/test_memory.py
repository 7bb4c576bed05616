"""What is left for KV, when the models and their largest step have taken theirs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from specpaged.config import EMBEDDED_DRAFT, EMBEDDED_TARGET, EngineConfig
from specpaged.modeling.model_runner import ModelRunner
from specpaged.modeling.pair import ModelPair
from specpaged.speculative_config import SpeculativeConfig
from specpaged.testing.heads import write_clover, write_eagle3
from specpaged.vllm_plugin import worker
from specpaged.vllm_plugin.memory import run_largest_step
from specpaged.vllm_plugin.worker import SpecPagedWorker

K = 4


@pytest.fixture(scope="module")
def pair():
    return ModelPair.load(config())


def config(**arguments):
    speculative = SpeculativeConfig(model=EMBEDDED_DRAFT, num_speculative_tokens=K)
    return EngineConfig(
        model=EMBEDDED_TARGET,
        speculative_config=speculative,
        **({"max_model_len": 64, "max_num_seqs": 6, "max_num_batched_tokens": 100} | arguments),
    )


@pytest.mark.parametrize(
    ("arguments", "num_tokens", "num_logits"),
    [
        ({}, 100, 6 * (K + 1)),
        ({"max_num_seqs": 50}, 100, 50 * 2),
        ({"max_num_seqs": 1}, 64, K + 1),  # of one sequence no more than max_model_len
        ({"max_num_seqs": 3, "max_num_batched_tokens": 3}, 3, 3),
        ({"max_num_seqs": 6, "max_num_batched_tokens": 8, "device_round": True}, 6 * (K + 1), 6 * (K + 1)),
    ],
    ids=str,
)
def test_the_largest_step_takes_both_models_through_all_tokens(pair, monkeypatch, arguments, num_tokens, num_logits):
    seen, forward = [], ModelRunner.forward

    def counting(self, batch, **options):
        seen.append((self.model.kv_spec, batch.num_tokens, len(batch.logits_idx)))
        return forward(self, batch, **options)

    monkeypatch.setattr(ModelRunner, "forward", counting)
    run_largest_step(pair, config(**arguments))
    assert seen == [(model.kv_spec, num_tokens, num_logits) for model in (pair.target, pair.draft)]


@pytest.mark.parametrize("method", ["eagle3", "clover"])
def test_the_largest_step_has_heads_read_hidden_states_of_all_tokens(tmp_path, monkeypatch, method):
    write = write_eagle3 if method == "eagle3" else write_clover
    write(tmp_path, AutoConfig.from_pretrained(EMBEDDED_TARGET))
    speculative = SpeculativeConfig(method=method, model=str(tmp_path), num_speculative_tokens=K)
    with_heads = replace(config(), speculative_config=speculative)
    loaded = ModelPair.load(with_heads)
    seen, forward = [], ModelRunner.forward

    def counting(self, batch, hidden=None, features=None):
        seen.append((batch.hidden_idx is not None and len(batch.hidden_idx), features and len(features.values)))
        return forward(self, batch, hidden=hidden, features=features)

    monkeypatch.setattr(ModelRunner, "forward", counting)
    run_largest_step(loaded, with_heads)
    assert seen == [(100, None), (False, 100)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"enforce_eager": True}, 800 - 250 - 70),
        ({}, 800 - 250 - 140),
        ({"device_round": True}, 800 - 250 - 210 - 5),
        ({"device_round": True, "enforce_eager": True}, 800 - 250 - 70 - 5),
    ],
)
def test_kv_gets_what_the_largest_step_leaves_of_the_fraction(monkeypatch, arguments, expected):
    """Of 1000 bytes 100 are another's; ours are 250 after loading, 200 of them in tensors; a step rises to 270, and
    captured passes keep as much, and captured rounds. What rounds know of sequences is 5 bytes."""
    allocated = {"peak": 0}

    def step(pair, config):
        allocated["peak"] = 270

    monkeypatch.setattr(worker, "run_largest_step", step)
    monkeypatch.setattr(worker, "state_bytes", lambda *sizes: 5)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: allocated["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: allocated.update(peak=200))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (650, 1000))
    ours = SpecPagedWorker.__new__(SpecPagedWorker)
    ours.pair, ours.device, ours.engine_config = None, torch.device("cuda", 0), config(**arguments)
    ours.free_bytes = 900
    assert ours._free_device_memory(0.8) == expected
    with pytest.raises(ValueError, match=r"gpu_memory_utilization=0\.95 asks for 950 bytes; allowed: .* 900"):
        ours._free_device_memory(0.95)
