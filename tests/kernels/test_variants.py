"""Ahead-of-time compilation: the table of variants builds, fits into registers, and is all that the engine launches."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from specpaged import LLM, SamplingParams
from specpaged_kernels.jit import OPTIONS, TYPES
from specpaged_kernels.variants import ARCHS, all_variants, name
from tests import toys

KERNELS = Path(__file__).parents[2] / "kernels"
ALIGNED = 16


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Every variant for every architecture, in processes without the interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(KERNELS), "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    command = [sys.executable, "-m", "specpaged_kernels.variants", "--json"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)


def test_every_variant_compiles_for_every_architecture(compiled):
    expected = sorted((name(variant), arch) for variant in all_variants() for arch in ARCHS)
    assert sorted((entry["name"], entry["arch"]) for entry in compiled) == expected
    assert len(set(expected)) == len(expected)


def test_nothing_spills_in_half_precision(compiled):
    half = [entry for entry in compiled if "*fp16" in entry["name"] or "*bf16" in entry["name"]]
    assert len(half) > len(compiled) / 2
    assert [entry for entry in half if entry["stack_bytes"]] == []


def test_shared_memory_fits_the_device(compiled):
    most = {80: 163 * 1024, 90: 227 * 1024}  # of a block: CUDA C++ Programming Guide, compute capabilities
    assert [entry for entry in compiled if entry["shared_bytes"] > most[entry["arch"]]] == []


def key(function, types: dict[str, str], constants: dict) -> tuple:
    options = {k: v for k, v in constants.items() if k not in OPTIONS or k != "enable_fp_fusion"}
    return f"{function.__module__}.{function.__name__}", tuple(sorted(types.items())), tuple(sorted(options.items()))


class Launches:
    """Notes what each launch would be compiled for."""

    def __init__(self, monkeypatch):
        self.keys: set[tuple] = set()
        self.unaligned: set[tuple] = set()
        run = InterpretedFunction.run

        def recording(kernel, *args, grid, warmup, **kwargs):
            self.record(kernel, args, kwargs)
            return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)

        monkeypatch.setattr(InterpretedFunction, "run", recording)

    def record(self, kernel, args: tuple, constants: dict) -> None:
        types = {}
        not_special = kernel.kwargs.get("do_not_specialize") or []
        for argument, value in zip(kernel.arg_names, args, strict=False):
            if isinstance(value, torch.Tensor):
                types[argument] = f"*{TYPES[value.dtype]}"
            elif isinstance(value, float):
                types[argument] = "fp32"
            address = value.data_ptr() if isinstance(value, torch.Tensor) else value
            if argument not in not_special and address % ALIGNED:
                self.unaligned.add((kernel.fn.__name__, argument))
        self.keys.add(key(kernel.fn, types, constants))


def table() -> set[tuple]:
    return {key(variant.kernel.fn, variant.types, variant.constants) for variant in all_variants()}


def test_the_engine_launches_nothing_that_is_not_in_the_table(tmp_path, monkeypatch):
    """A pair with head_dim 32, as no smaller one is compiled; with speculation, sampling, a prefill and splits."""
    for role, seed in (("target", 0), ("draft", 1)):
        toys.model(seed, head_dim=32, num_hidden_layers=1).save_pretrained(tmp_path / role)
    launches = Launches(monkeypatch)
    llm = LLM(
        str(tmp_path / "target"),
        speculative_config={"model": str(tmp_path / "draft"), "num_speculative_tokens": 2, "numerics": "exact"},
        attention_backend="triton",
        max_model_len=64,
        max_num_seqs=2,
    )
    params = [SamplingParams(temperature=t, max_tokens=3, seed=1, ignore_eos=True) for t in (0.0, 1.0)]
    llm.generate(toys.prompts(2), params, use_tqdm=False)
    assert launches.keys <= table()
    assert launches.unaligned == set()
    launched = {k[0].rpartition(".")[2] for k in launches.keys}
    assert launched >= {"_attend_kernel", "_merge_kernel", "_store_kernel", "_linear_kernel", "_rms_norm_kernel",
                        "_argmax_kernel", "_sample_kernel", "_accept_kernel"}  # fmt: skip
