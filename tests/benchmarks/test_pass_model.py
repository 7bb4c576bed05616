"""Sums of bytes, flops and launches, on made-up machines; and that they are those of the passes that run."""

import json
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig
from triton.runtime.interpreter import InterpretedFunction

from benchmarks.device import model
from benchmarks.device.__main__ import main
from benchmarks.device.pass_model import (
    GPUS,
    MODELS,
    Kernel,
    Machine,
    break_even,
    held_bytes,
    kernels_of,
    pass_seconds,
    round_seconds,
    tokens_per_round,
)
from benchmarks.roofline import work_of
from specpaged.modeling.flat.config import flat_config
from specpaged.modeling.linear import FastLinear
from specpaged.modeling.loading import load_model
from specpaged.modeling.model_runner import ModelRunner
from specpaged.modeling.ragged_batch import RaggedRow, pack
from specpaged.paging.kv_cache import PagedKVCache
from tests import toys


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize(("num_seqs", "query_len", "context_len"), [(1, 1, 512), (32, 5, 8000)])
def test_matrices_and_their_flops_are_those_of_the_roofline(name, num_seqs, query_len, context_len):
    """`benchmarks.roofline` counts the same pass in another way, from a checkpoint's tensors."""
    config = MODELS[name]
    work = work_of(config, 0, 2, [context_len] * num_seqs, [query_len] * num_seqs)
    kernels = list(kernels_of(config, num_seqs, query_len, context_len))
    assert sum(kernel.count * kernel.flops for kernel in kernels) == pytest.approx(work.flops, rel=1e-6)
    attention = next(kernel for kernel in kernels if kernel.name == "attention")
    if query_len == 1:
        assert attention.count * attention.num_bytes >= work.kv_bytes
        rows = attention.count * 2 * num_seqs * config.num_heads * config.head_dim * 2
        assert attention.count * attention.num_bytes - rows == pytest.approx(work.kv_bytes, rel=0.3)


@pytest.mark.parametrize(
    ("name", "billions"), [("Qwen3-8B", 8.19), ("Qwen3-0.6B", 0.596), ("Llama-2-7B", 6.74), ("Llama-68M", 0.068),
                           ("Llama-3.1-8B", 8.03), ("Llama-3.1-70B", 70.55)],
)  # fmt: skip
def test_shapes_have_the_parameters_that_their_names_say(name, billions):
    assert held_bytes(MODELS[name], 0, 0) / 2e9 == pytest.approx(billions, rel=0.01)


def test_a_kernel_takes_its_launch_and_the_larger_of_its_two_roofs():
    machine = Machine("made up", 1e9, 1e12, 1e-6)
    assert Kernel("read", 1e6, 1e6, launches=2, count=3).seconds(machine) == pytest.approx(3 * (2e-6 + 1e-3))
    assert Kernel("multiply", 1e6, 4e9).seconds(machine) == pytest.approx(1e-6 + 4e-3)


def test_speculation_pays_from_the_acceptance_on_that_makes_up_for_its_round():
    config = MODELS["Qwen3-8B"], MODELS["Qwen3-0.6B"]
    plain, speculative = (round_seconds(*config, GPUS["H100-SXM"], 4, k, 512) for k in (0, 4))
    needed = break_even(speculative, plain, 4)
    assert tokens_per_round(4, needed) * plain == pytest.approx(speculative)
    assert 0 < needed < 0.7
    assert break_even(5.1, 1.0, 4) is None
    assert tokens_per_round(3, 1.0) == 4
    assert tokens_per_round(2, 0.5) == 1.75


def test_more_rows_cost_next_to_nothing_until_arithmetic_binds():
    """Weights of 15 GB at 3.35 TB/s are 4.5 ms; 1,280 rows of 8 B parameters at 989 Tflop/s are twenty."""
    config, machine = MODELS["Qwen3-8B"], GPUS["H100-SXM"]
    one, six, many = (pass_seconds(config, machine, b, q, 512) for b, q in ((1, 1), (1, 6), (256, 5)))
    assert one < six < 1.05 * one
    assert many > 3 * one


class CountedLaunches(TorchDispatchMode):
    """Kernels of torch's that a device would launch: operations that write memory, and are no views."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = str(function).removeprefix("aten.").partition(".")[0]
        read = {tensor.untyped_storage().data_ptr() for tensor in tree_leaves(args) if isinstance(tensor, torch.Tensor)}
        made = [tensor for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor)]
        is_view = bool(made) and all(tensor.untyped_storage().data_ptr() in read for tensor in made)
        if made and not name.startswith("empty") and (name.endswith("_") or not is_view):
            self.names.append(name)
        return result


def launches(path, num_layers: int, qk_norm: bool, monkeypatch) -> tuple[Counter, int]:
    """Of a pass of a toy in half precision, which is counted and not run; and what the model has."""
    config = toys.config(num_hidden_layers=num_layers)
    if not qk_norm:
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
                 "head_dim", "max_position_embeddings", "num_hidden_layers")  # fmt: skip
        config = LlamaConfig(**{name: getattr(config, name) for name in names})
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    loaded = load_model(str(path), dtype="bfloat16", max_model_len=64, attention_backend="triton", numerics="fast")
    runner = ModelRunner(loaded, PagedKVCache(loaded.kv_spec, 8, 16, loaded.dtype, "cpu"))
    launched: Counter = Counter()

    def launch(kernel, grid):
        return lambda *args, **kwargs: launched.update([kernel.fn.__name__])

    with monkeypatch.context() as patch, CountedLaunches() as counted:
        patch.setattr(InterpretedFunction, "__getitem__", launch)
        for module in loaded.decoder.modules():
            if isinstance(module, FastLinear):  # which has conversions of its own on a CPU
                patch.setattr(module, "forward", lambda x, out=module.out_features: x.new_zeros(len(x), out))
        runner.forward(pack([RaggedRow([1, 2], 3, [1], 2)], 16))
    kernels = kernels_of(flat_config(loaded.hf_config), 1, 2, 3)
    return launched + Counter(counted.names), sum(kernel.count * kernel.launches for kernel in kernels)


@pytest.mark.parametrize("qk_norm", [True, False])
def test_a_layers_launches_are_those_of_a_pass(tmp_path, monkeypatch, qk_norm):
    (two, expected_two), (four, expected_four) = (
        launches(tmp_path / str(count), count, qk_norm, monkeypatch) for count in (2, 4)
    )
    assert (four - two).total() == expected_four - expected_two, four - two


def test_the_command_says_that_it_is_a_model_and_by_which_inputs(tmp_path, capsys):
    result = main(["--model", "--out", str(tmp_path), "--bandwidth", "1e12", "--share", "0.5"])
    assert result["inputs"]["bytes_per_second"] == 1e12
    assert result["inputs"]["share"] == 0.5
    assert "Nothing here was measured on a GPU" in result["is"]
    saved = json.loads((tmp_path / "device-model-h100-sxm.json").read_text())
    assert saved["is"] == result["is"]
    assert len(saved["cells"]) == len(model.PAIRS) * 2 * 9 * 9
    assert (tmp_path / "device-model-h100-sxm.png").stat().st_size > 10_000
    out = capsys.readouterr().out
    assert "a model: sums of bytes" in out
    large = [cell for cell in saved["cells"] if cell["target"] == "Llama-3.1-70B" and cell["B"] == 1]
    assert {cell["gpus"] for cell in large} == {4}  # whose memory holds 157 GB of weights


def test_sums_are_held_against_passes_of_this_cpu():
    """How far they are apart is a measurement, and not for a test to say."""
    result = model.check(batch_sizes=(1, 2), repetitions=2, context_len=32)
    passes = [(entry["model"], entry["B"], entry["rows"]) for entry in result["passes"]]
    assert passes == [(*of, rows) for of in (("target", 1), ("target", 2)) for rows in (1, 6)] + [
        ("draft", 1, 1),
        ("draft", 2, 1),
    ]
    for entry in result["passes"]:
        assert 0 < entry["measured_over_model"]["min"] <= entry["measured_over_model"]["median"]
