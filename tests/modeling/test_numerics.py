"""The start-up probe: it finds exact schemes, agrees with itself between processes, and can fail."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN

from specpaged.modeling import linear, numerics
from specpaged.modeling.attention.folded import attend_chunked, attend_sdpa
from specpaged.modeling.exact import (
    ELEMENTWISE_GRAIN,
    ElementwisePieces,
    ExactLinears,
    RowExactExperts,
    RowwiseModule,
    aligned_multiple,
    find_routers,
    is_activation,
    make_exact,
)
from specpaged.modeling.linear import FastLinear, LinearScheme, RowExactLinear
from specpaged.modeling.loading import load_model
from specpaged.modeling.numerics import (
    AttentionScheme,
    InexactError,
    attention_is_exact,
    candidate_linear_schemes,
    choose_attention_scheme,
    choose_linear_scheme,
    probe_rows,
    row_counts_that_differ,
)
from tests.modeling.families import save_toy

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def fresh_probes(monkeypatch):
    """No choice is taken from the cache, and none made here stays in it: others keep theirs."""
    for name in ("_choose_linear_scheme", "_choose_attention_scheme"):
        monkeypatch.setattr(numerics, name, cache(getattr(numerics, name).__wrapped__))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(64, 64), (96, 40), (5, 64), (1100, 768)])
def test_chosen_linear_is_close_to_stock_and_exact_at_every_row_count(n, k, dtype, bias):
    scheme = choose_linear_scheme(n, k, bias, dtype, CPU)
    generator = torch.Generator().manual_seed(1)
    weight = (torch.randn(n, k, generator=generator) / k**0.5).to(dtype)
    bias_values = torch.randn(n, generator=generator).to(dtype) if bias else None
    layer = RowExactLinear(weight, bias_values, scheme)
    x = torch.randn(600, k, generator=generator).to(dtype)
    expected = layer(x)
    tolerance = dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else dict(rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(expected, F.linear(x, weight, bias_values), **tolerance)
    for rows in (*range(1, 24), 47, 64, 131, 256, 257, 513):
        assert torch.equal(layer(x[600 - rows :].clone()), expected[600 - rows :]), rows
    assert layer(x[:0].view(1, 0, k)).shape == (1, 0, n)
    assert layer(x[:6].view(2, 3, k)).shape == (2, 3, n)


def test_probe_finds_a_linear_whose_rows_depend_on_their_number():
    weight = torch.randn(64, 64)

    def planted(x):
        y = torch.cat([F.linear(row[None], weight) for row in x])
        return y * (1 + 2**-22 * (x.shape[0] == 9))

    assert row_counts_that_differ(planted, 64, probe_rows(64, 64), torch.float32, CPU) == [9]


def test_probe_finds_a_linear_whose_rows_depend_on_their_place():
    weight = torch.randn(64, 64, dtype=torch.float64)

    def planted(x):
        y = F.linear(x.double(), weight)
        y[-1] *= 1 + 2e-7
        return y.float()

    assert row_counts_that_differ(planted, 64, probe_rows(64, 64), torch.float32, CPU)


def test_a_row_dependent_kernel_is_passed_over_and_without_another_exact_is_refused(
    monkeypatch, fresh_probes, toy_path
):
    stock = F.linear

    def row_dependent(x, weight, bias=None):
        return stock(x, weight, bias) * (1 + 2**-22 * (x.numel() // x.shape[-1] % 3))

    monkeypatch.setattr(linear.F, "linear", row_dependent)
    first = choose_linear_scheme(64, 64, False, torch.float32, CPU)
    # In some versions of oneDNN small products depend on the rows, too.
    packed = RowExactLinear(torch.randn(64, 64), None, LinearScheme("packed", 1, 2, 256))
    exact = linear.can_pack(torch.float32, CPU) and not row_counts_that_differ(
        packed, 64, probe_rows(64, 64), torch.float32, CPU
    )
    assert first.name == ("packed" if exact else "stock per row")
    monkeypatch.setattr(linear, "can_pack", lambda *_: False)
    monkeypatch.setattr(numerics, "can_pack", lambda *_: False)
    numerics._choose_linear_scheme.cache_clear()
    assert choose_linear_scheme(64, 64, False, torch.float32, CPU).name == "stock per row"
    calls = iter(range(10**9))
    monkeypatch.setattr(linear.F, "linear", lambda x, w, b=None: stock(x, w, b) + next(calls))
    numerics._choose_linear_scheme.cache_clear()
    with pytest.raises(InexactError, match=r"qwen2.*Qwen2ForCausalLM.*numerics='fast'"):
        load_model(toy_path("qwen2"), attention_backend="torch")


def test_attention_probe_rejects_what_depends_on_rows_or_kv_length():
    scheme = AttentionScheme("sdpa", 4, (64, 512), True, 64)

    def by_rows(query, keys, values, hidden, scaling):
        return attend_sdpa(query, keys, values, hidden, scaling) * (1 + 2**-22 * (query.shape[2] % 3))

    def by_length(query, keys, values, hidden, scaling):
        return attend_sdpa(query, keys, values, hidden, scaling) * (1 + 2**-22 * (keys.shape[2] == 576))

    def by_batch(query, keys, values, hidden, scaling):
        return attend_sdpa(query, keys, values, hidden, scaling) * (1 + 2**-22 * (query.shape[0] == 3))

    for planted in (by_rows, by_length, by_batch):
        assert not attention_is_exact(planted, scheme, 4, 2, 32, torch.float32, CPU)


def test_chunked_attention_is_exact_in_buckets_that_sdpa_may_not_be():
    every = AttentionScheme("chunked", 16, tuple(range(64, 513, 64)), True, 64)
    assert attention_is_exact(attend_chunked, every, 4, 2, 32, torch.float32, CPU)


def test_attention_falls_back_to_the_chunked_form_and_then_refuses(monkeypatch, fresh_probes):
    honest = attention_is_exact
    monkeypatch.setattr(numerics, "attention_is_exact", lambda f, *rest: f is not attend_sdpa and honest(f, *rest))
    geometry = [(4, 2, 16)]
    assert choose_attention_scheme(geometry, torch.float32, CPU).kernel == "chunked"
    numerics._choose_attention_scheme.cache_clear()
    monkeypatch.setattr(numerics, "attention_is_exact", lambda *_: False)
    with pytest.raises(InexactError, match="attention"):
        choose_attention_scheme(geometry, torch.float32, CPU)


def test_probed_rows_bound_the_rows_of_a_call_and_depend_on_the_shape_alone():
    assert probe_rows(256, 256) == numerics.PROBE_ROWS
    assert probe_rows(2**17, 2**12)[-1] == 16
    layer = RowExactLinear(torch.randn(8, 8), None, LinearScheme("stock", 4, 4, 16))
    seen = []
    layer._gemm = lambda x: seen.append(x.shape[0]) or x
    layer(torch.randn(39, 8))
    assert seen == [16, 16, 8]


def test_candidates_in_their_fixed_order():
    def names(n, k, dtype):
        return [scheme.name for scheme in candidate_linear_schemes(n, k, dtype, CPU)]

    packed = ["packed"] if linear.can_pack(torch.float32, CPU) else []
    assert names(64, 64, torch.float32) == ["stock x4", *packed, "stock x16", "stock per row"]
    assert names(2048, 256, torch.float32) == [*packed, "stock x4", "stock x16", "stock per row"]
    bf16 = names(64, 64, torch.bfloat16)
    assert bf16[0] == ("stock x4" if linear.can_pack(torch.bfloat16, CPU) else "float32 stock x4")
    assert bf16[-1] == "stock per row"


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("inner", [33, 40, 64])
def test_element_wise_tails_are_aligned_away(name, inner):
    """At the row multiple for this inner size, a row's activation does not depend on where the tensor ends."""
    multiple = aligned_multiple(4, {inner}, 1, torch.float32)
    x = torch.randn(multiple * 7, inner) * 3
    expected = ACT2FN[name](x)
    for rows in range(multiple, 7 * multiple, multiple):
        assert torch.equal(ACT2FN[name](x[:rows].clone()), expected[:rows])


def test_rows_leave_no_tail_after_pairs_of_vectors_of_their_dtype():
    """On AVX-512 such a pair has 32 float32 or 64 bfloat16 elements."""
    assert aligned_multiple(2, {33}, 1, torch.float32) == 32
    assert aligned_multiple(2, {33}, 1, torch.bfloat16) == 64
    assert aligned_multiple(2, {96}, 2, torch.bfloat16) == 4


@pytest.fixture
def three_threads():
    """A number that cuts tensors at any place: what one thread computes is the reference."""
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("fused", [False, True])
def test_activations_in_pieces_on_three_threads_equal_the_whole_on_one(name, fused, three_threads):
    """Also on half of a fused projection. GELU is split from fewer elements than the others."""
    activation = ACT2FN[name]
    sizes = []
    activation.register_forward_pre_hook(lambda _, args: sizes.append(args[0].numel()))
    for rows in (140, 500, 700, 1300):
        x = torch.randn(1, rows, 128 if fused else 64, generator=torch.Generator().manual_seed(rows)).mul(3)[..., :64]
        got = ElementwisePieces(activation)(x)
        torch.set_num_threads(1)
        expected = activation(x.contiguous())
        torch.set_num_threads(3)
        assert torch.equal(got, expected), rows
        sizes.pop()
    assert max(sizes) == ELEMENTWISE_GRAIN


def test_activations_are_found_by_what_they_do():
    names = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu2", "quick_gelu", "tanh", "sigmoid")
    assert all(is_activation(ACT2FN[name]) for name in names)
    others = (nn.Softmax(-1), nn.GLU(), nn.PReLU(6), nn.MultiheadAttention(6, 2), nn.Dropout(0.0), nn.Linear(6, 6))
    assert not any(is_activation(module) for module in others)


@pytest.mark.parametrize("name", ["qwen3", "phi3", "glm4", "gemma2"])
@pytest.mark.parametrize("model_impl", ["flat", "transformers"])
def test_activations_of_every_name_run_in_pieces_on_three_threads(name, model_impl, toy_path, three_threads):
    model = load_model(toy_path(name), model_impl=model_impl, attention_backend="torch")
    pieces = [module for module in model.decoder.modules() if isinstance(module, ElementwisePieces)]
    assert len(pieces) == (1 if model_impl == "flat" else model.hf_config.num_hidden_layers)


class Chooser(nn.Module):
    def __init__(self, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape))


def test_routers_are_the_matrices_beside_experts_with_a_row_for_each():
    experts = Chooser(4, 6)
    experts.gate_up_proj, experts.is_transposed, experts._apply_gate = nn.Parameter(torch.randn(5, 8, 6)), False, None
    block = nn.ModuleDict({"experts": experts, "any_name": Chooser(5, 6), "gate": Chooser(7, 6)})
    assert find_routers(nn.ModuleDict({"mlp": block, "gate": Chooser(5, 6)})) == {"mlp.any_name"}


@pytest.mark.parametrize(("n", "k"), [(40, 64), (1024, 1024)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fast_linear_is_close_to_stock(n, k, dtype):
    weight, bias = (torch.randn(n, k) / k**0.5).to(dtype), torch.randn(n).to(dtype)
    layer = FastLinear(weight, bias)
    for rows in (1, 2, 7, 40):
        x = torch.randn(1, rows, k).to(dtype)
        tolerance = dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else dict(rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(layer(x), F.linear(x, weight, bias), **tolerance)


@pytest.mark.parametrize("backend", ["torch", "cpp"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "glm4_moe"])
def test_router_and_experts_have_the_same_bits_at_every_row_count(name, backend, toy_model):
    """Also where the pass around them is not padded."""
    model = toy_model(name, dtype="float32", attention_backend=backend)
    router = next(m for m in model.decoder.modules() if isinstance(m, RowwiseModule))
    experts = next(m for m in model.decoder.modules() if isinstance(m, RowExactExperts))
    x = torch.randn(600, model.hf_config.hidden_size, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        routed = router(x)
        weights, choices = routed[-2:]
        expected = experts(x, choices, weights)
        for start, stop in [(0, 1), (7, 9), (11, 14), (20, 33), (100, 500), (583, 600)]:
            part = x[start:stop].clone()
            some = router(part)
            assert all(torch.equal(a, b[start:stop]) for a, b in zip(some, routed, strict=True))
            assert torch.equal(experts(part, some[-1], some[-2]), expected[start:stop])


def test_a_matrix_outside_a_linear_layer_is_refused_by_name():
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mixing = torch.nn.Parameter(torch.randn(4, 4))

    with pytest.raises(InexactError, match=r"block \(Odd\) multiplies by mixing"):
        make_exact(torch.nn.ModuleDict({"block": Odd()}), ExactLinears(CPU, "torch"))


def test_another_thread_count_than_at_load_is_an_error(toy_model):
    from tests.modeling.world import World

    world = World(toy_model("qwen2"))
    torch.set_num_threads(2)
    try:
        with pytest.raises(RuntimeError, match="set_num_threads"):
            world.run(("a", [5], 1))
    finally:
        torch.set_num_threads(1)


SCRIPT = """
import hashlib, json, sys
import torch
from specpaged.modeling.loading import load_model
from specpaged.modeling.numerics import _choose_attention_scheme, _choose_linear_scheme
from tests.modeling.world import World, random_tokens

def run(path, dtype, threads, backend, sequences, drafts):
    torch.set_num_threads(threads)
    _choose_linear_scheme.cache_clear()
    _choose_attention_scheme.cache_clear()
    model = load_model(path, dtype=dtype, attention_backend=backend)
    tokens = random_tokens(70, 9)
    world = World(model, block_size=[16, 4][sequences > 1], seed=sequences)
    mates = [f"m{i}" for i in range(sequences - 1)]
    world.run(("a", tokens[:40], 0), *((m, random_tokens(3 + 5 * i, i), 0) for i, m in enumerate(mates)))
    rows = []
    for start in range(40, 70, drafts + 1):
        step = tokens[start:start + drafts + 1]
        others = [(m, random_tokens(1 + i % (drafts + 1), start), 1) for i, m in enumerate(mates)]
        rows.append(world.run(*others, ("a", step, len(step)))["a"])
    logits = torch.cat(rows).contiguous()
    return [model.numerics_scheme, hashlib.sha256(logits.numpy().tobytes()).hexdigest()]

cases, *batches = json.loads(sys.argv[1])
print(json.dumps([[run(*case, *batch) for case in cases] for batch in batches]))
"""


PREFILL_SCRIPT = """
import json, sys
import torch
from specpaged.modeling.loading import load_model
from tests.modeling.world import World, random_tokens

torch.set_num_threads(3)
different = {}
for name, (path, *how) in json.loads(sys.argv[1]).items():
    model = load_model(path, model_impl=how[0], attention_backend=how[1])
    tokens = random_tokens(980, 4)
    world = World(model, poison=False)
    chunks = torch.cat([world.run(("a", tokens[i : i + 98], 98))["a"] for i in range(0, 980, 98)])
    for length in (300, 772, 844):
        whole = World(model, poison=False).run(("a", tokens[:length], length))["a"]
        different.setdefault(name, []).append(int((whole != chunks[:length]).any(dim=1).sum()))
print(json.dumps(different))
"""


def run_script(script: str, argument: object) -> object:
    # Waiting threads sleep instead of spinning: the cores are shared.
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    command = [sys.executable, "-c", script, json.dumps(argument)]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_a_model_that_is_loaded_again_has_the_same_scheme_and_bits_in_another_batch(toy_path):
    """One decodes one sequence token by token, the other verifies seven drafts of each of 32 sequences.

    Schemes are chosen anew for the second one, by what kernels do.
    """
    cases = [
        ("qwen3", "float32", 1, "torch"),
        ("qwen3", "float32", 2, "cpp"),
        ("gpt_oss", "bfloat16", 1, "cpp"),
        ("qwen3_moe", "float32", 2, "torch"),
        ("gemma2", "bfloat16", 2, "torch"),
        ("gemma2", "bfloat16", 2, "cpp"),
    ]
    cases = [(toy_path(name), *case) for name, *case in cases]
    one, many = run_script(SCRIPT, [cases, (1, 0), (32, 7)])
    assert all(scheme.startswith("exact: ") for scheme, _ in one)
    assert many == one


def test_long_prefills_on_three_threads_have_the_bits_of_their_chunks(tmp_path):
    """Activations of long prefills are split over threads, those of their chunks are not."""
    cases = {}
    for name in ("qwen3", "phi3", "glm4", "gemma2"):
        path = save_toy(name, tmp_path, intermediate_size=128)
        for how in (("transformers", "torch"), ("flat", "torch"), ("flat", "cpp")):
            cases[" ".join((name, *how))] = (path, *how)
    assert run_script(PREFILL_SCRIPT, cases) == {name: [0, 0, 0] for name in cases}
