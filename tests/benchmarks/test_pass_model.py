"""Sums of bytes, flops and launches, on made-up machines; and that they are those of the passes that run."""

import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from benchmarks.device import model
from benchmarks.device.__main__ import main
from benchmarks.device.pass_model import (
    GPUS,
    MODELS,
    Kernel,
    Machine,
    Sizes,
    break_even,
    held_bytes,
    kernels_of,
    pass_seconds,
    round_seconds,
    tokens_per_round,
)
from benchmarks.roofline import work_of
from specpaged.modeling.flat.config import flat_config
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
    """Kernels that a device would launch: operations of torch that are no views, beside our own kernels."""

    FREE = ("view", "slice", "split", "empty", "as_strided", "detach", "unsqueeze", "expand", "alias", "transpose",
            "select.int", "chunk", "permute", "t.default", "unbind", "lift")  # fmt: skip

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function).removeprefix("aten.")
        if not name.removeprefix("_").startswith(self.FREE):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("qk_norm", [True, False])
def test_launches_are_those_of_a_pass(tmp_path, monkeypatch, qk_norm):
    """Of a toy in half precision, on our kernels, which are counted and not run."""
    if qk_norm:
        toys.model(head_dim=32).half().save_pretrained(tmp_path)
    else:
        from tests.modeling.families import save_toy

        tmp_path = save_toy("llama", tmp_path)
    loaded = load_model(str(tmp_path), dtype="float16", max_model_len=64, attention_backend="triton", numerics="exact")
    runner = ModelRunner(loaded, PagedKVCache(loaded.kv_spec, 8, 16, loaded.dtype, "cpu"))
    launched: list[str] = []

    def launch(kernel, grid):
        return lambda *args, **kwargs: launched.append(kernel.fn.__name__)

    batch = pack([RaggedRow([1, 2], 3, [1], 2)], 16)
    runner.forward(batch, argmax_of=loaded.vocab_size)
    monkeypatch.setattr(InterpretedFunction, "__getitem__", launch)
    with CountedLaunches() as counted, torch.inference_mode(False), torch.no_grad():
        runner.forward(batch, argmax_of=loaded.vocab_size)
    config = flat_config(loaded.hf_config)
    expected = sum(kernel.count * kernel.launches for kernel in kernels_of(config, 1, 2, 3, Sizes()))
    assert abs(len(launched) + len(counted.names) - expected) <= 0.1 * expected, (launched, counted.names)


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
