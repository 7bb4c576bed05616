"""Hidden states come along with a pass: transformers' own, bit for bit alike in any chunks, and logits stay theirs."""

import dataclasses

import pytest
import torch
import transformers
from torch import nn

from specpaged.modeling.attention.new_pass import new_pass
from specpaged.modeling.families import find_decoder_layers
from specpaged.modeling.flat import config as flat_families
from specpaged.modeling.flat.cpp_decoder import CppDecoder
from specpaged.modeling.forward_output import ForwardRequest, HiddenStatesRequest
from specpaged.modeling.ragged_batch import RaggedRow, pack
from tests.modeling.families import FAMILIES, toy_config
from tests.modeling.world import World, random_tokens

pytestmark = pytest.mark.usefixtures("without_bfloat16_units")
FLAT = [name for name in FAMILIES if toy_config(name).model_type in flat_families.FAMILIES]
DECODERS = [(name, kind) for name in FLAT for kind in ("one call", "by parts", "torch")]
DECODERS += [(name, "transformers") for name in FAMILIES]
A, B, C = (random_tokens(length, seed) for length, seed in ((40, 1), (33, 2), (50, 3)))
# (sequence, from, to, number of logits, number of hidden states): prefills, decodes and verifies beside each other.
STEPS = [
    [("a", 0, 19, 0, 5), ("b", 0, 7, 2, 0)],
    [("b", 7, 8, 1, 1), ("a", 19, 30, 3, 11), ("c", 0, 20, 6, 2)],
    [("c", 20, 24, 4, 4), ("a", 30, 31, 1, 1)],
    [("a", 31, 40, 0, 9), ("b", 8, 33, 0, 0), ("c", 24, 50, 0, 3)],
    [("b", 0, 1, 1, 0)],
]


def load(toy_model, name: str, kind: str, dtype: str = "float32"):
    backend = "cpp" if kind in ("one call", "by parts") else "torch"
    implementation = "transformers" if kind == "transformers" else "flat"
    model = toy_model(name, dtype=dtype, model_impl=implementation, attention_backend=backend)
    if kind == "one call":
        assert isinstance(model.decoder, CppDecoder)
    if kind == "by parts":
        model = dataclasses.replace(model, decoder=model.decoder.decoder)
    return model


def request(model) -> HiddenStatesRequest:
    """Not in the order of layers."""
    return HiddenStatesRequest(last=True, layer_inputs=(len(model.kv_spec.layers) - 1, 0, 1))


def rows_of(step) -> list[tuple]:
    tokens = {"a": A, "b": B, "c": C}
    return [(name, tokens[name][start:stop], *wanted) for name, start, stop, *wanted in step]


def reference(path: str, tokens: list[int]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """What transformers' final norm reads [N, H], and the hidden states that it returns."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    read = []
    model.model.norm.register_forward_pre_hook(lambda _, args: read.append(args[0][0].clone()))
    with torch.inference_mode():
        output = model(input_ids=torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
    return read[0], tuple(states[0] for states in output.hidden_states)


@pytest.mark.parametrize(("name", "kind"), DECODERS)
def test_they_are_transformers_own(name, kind, toy_path, toy_model):
    model = load(toy_model, name, kind)
    world, wanted = World(model, block_size=4), request(model)
    # longrope: transformers has the long factors, as we do, for sequences of more than 32 tokens.
    expected = {key: reference(toy_path(name), tokens) for key, tokens in (("a", A), ("b", B), ("c", C))}
    for step in STEPS[:4]:
        got = world.forward(*rows_of(step), hidden=wanted).hidden_states
        counts = [num_hidden for *_, num_hidden in step]
        assert [len(states) for states in (got.last, *got.layer_inputs)] == [sum(counts)] * 4
        for i, (seq, _, stop, _, num_hidden) in enumerate(step):
            last, hidden_states = expected[seq]
            pairs = [(got.last, last)]
            pairs += zip(got.layer_inputs, (hidden_states[idx] for idx in wanted.layer_inputs), strict=True)
            for ours, theirs in pairs:
                rows = ours.split(counts)[i]
                torch.testing.assert_close(rows, theirs[stop - num_hidden : stop], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "kind"), DECODERS)
def test_asking_changes_no_bit_of_the_logits(name, kind, dtype, toy_model):
    model = load(toy_model, name, kind, dtype)
    whole = request(model)
    requests = [whole, HiddenStatesRequest(last=True), HiddenStatesRequest(layer_inputs=(1,)), HiddenStatesRequest()]
    quiet, *asking = (World(model, block_size=4, seed=7) for _ in range(1 + len(requests)))
    for step in STEPS:
        expected = quiet.forward(*rows_of(step))
        assert expected.hidden_states is None
        for world, wanted in zip(asking, requests, strict=True):
            got = world.forward(*rows_of(step), hidden=wanted)
            assert got.logits.dtype == torch.float32
            assert torch.equal(got.logits, expected.logits)
            assert (got.hidden_states is None) == (not any(num_hidden for *_, num_hidden in step))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "kind"), DECODERS)
def test_those_of_chunks_are_those_of_the_whole(name, kind, dtype, toy_model):
    model = load(toy_model, name, kind, dtype)
    wanted = request(model)
    whole = World(model).forward(("c", C, 0, len(C)), hidden=wanted).hidden_states
    assert whole.last.dtype == whole.layer_inputs[0].dtype == model.dtype
    world, parts, position = World(model, block_size=4, seed=5), [], 0
    for step, size in enumerate((13, 1, 1, 20, 6, 9)):
        rows = [("c", C[position : position + size], step % 2, size), (f"m{step}", A[: 3 + 5 * step], 2, 0)]
        parts.append(world.forward(*rows, hidden=wanted).hidden_states)
        position += size
    assert position == len(C)
    assert torch.equal(torch.cat([part.last for part in parts]), whole.last)
    for i, states in enumerate(whole.layer_inputs):
        assert torch.equal(torch.cat([part.layer_inputs[i] for part in parts]), states)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FLAT)
def test_one_call_finds_those_of_its_parts(name, dtype, toy_model):
    worlds = [World(load(toy_model, name, kind, dtype), block_size=4) for kind in ("one call", "by parts")]
    for step in STEPS[:4]:
        ours, theirs = (world.forward(*rows_of(step), hidden=request(world.runner.model)) for world in worlds)
        assert torch.equal(ours.hidden_states.last, theirs.hidden_states.last)
        for one, other in zip(ours.hidden_states.layer_inputs, theirs.hidden_states.layer_inputs, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["by parts", "torch"])
def test_the_last_layer_runs_for_the_rows_that_are_wanted_alone(kind, toy_model):
    """Behind its attention. The rows of logits and of hidden states may overlap in any way."""
    model = load(toy_model, "llama", kind)
    seen = []
    handle = model.decoder.layers[-1].down.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    with_inputs = HiddenStatesRequest(layer_inputs=(1,))
    for wanted, num_rows in ((None, 5), (with_inputs, 5), (HiddenStatesRequest(last=True), 5 + 2 + 3)):
        seen.clear()
        world = World(model, block_size=4)
        world.forward(("a", A[:12], 1, 3), ("c", C[:30], 4, 7), hidden=wanted)
        multiple = model.row_multiple
        assert seen == [-(-num_rows // multiple) * multiple]
    handle.remove()


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
@pytest.mark.parametrize("wanted", [[], [41], [3, 4, 5, 40, 44], [44, 0, 12, 12, 11], list(range(40))])
def test_logits_are_those_of_every_row_whichever_are_wanted(name, wanted, toy_model):
    """In any order, or twice; and the KV of all is stored, though the last layer attends for these alone."""
    model = load(toy_model, name, "one call")
    batch = pack([RaggedRow(A, 0, [1, 2, 3], 2), RaggedRow(B[:5], 0, [4], 2)], 16)
    found = []
    for logits_idx in (None, torch.tensor(wanted, dtype=torch.int64)):
        cache = World(model).cache
        for layer in cache.layers:
            layer.zero_()
        paged_pass = new_pass(model, batch, len(A) + 5, cache.layers)
        with torch.inference_mode():
            output = model.run(batch.token_ids, batch.positions, paged_pass, ForwardRequest(logits_idx, None))
        stored = [layer.clone() for layer in cache.layers]
        found.append((output.logits, stored))
    (every, every_stored), (some, some_stored) = found
    assert torch.equal(some, every[wanted])
    assert all(torch.equal(x, y) for x, y in zip(every_stored, some_stored, strict=True))


@pytest.mark.parametrize("kind", ["one call", "torch", "transformers"])
def test_they_come_along_with_an_argmax(kind, toy_model):
    model = load(toy_model, "qwen3", kind)
    quiet, asking = World(model, block_size=4), World(model, block_size=4)
    rows = [("a", A, 3, 5), ("b", B, 1, 0)]
    expected = quiet.forward(*rows, hidden=request(model))
    got = asking.forward(*rows, argmax_of=100, hidden=request(model))
    assert got.logits is None
    assert torch.equal(got.argmax.token_ids, expected.logits[:, :100].argmax(dim=-1))
    assert got.argmax.ok.all()
    assert torch.equal(got.hidden_states.last, expected.hidden_states.last)


@pytest.mark.parametrize("kind", ["one call", "torch", "transformers"])
@pytest.mark.parametrize("layer_idx", [-1, 2])
def test_a_layer_that_is_not_there_is_refused(kind, layer_idx, toy_model):
    world = World(load(toy_model, "llama", kind))
    with pytest.raises(ValueError, match=rf"layers 0 \.\. 1 of the model, got \(0, {layer_idx}\)"):
        world.forward(("a", A, 1, 1), hidden=HiddenStatesRequest(layer_inputs=(0, layer_idx)))


def test_a_row_that_is_not_there_is_refused(toy_model):
    runner = World(load(toy_model, "llama", "one call")).runner
    batch = pack([RaggedRow([5, 6, 7], 0, [1], 3, 1)], 16)
    for row in (-1, 3):
        outside = dataclasses.replace(batch, hidden_idx=torch.tensor([row]))
        with pytest.raises(IndexError, match="hidden_idx leads outside"):
            runner.forward(outside, hidden=HiddenStatesRequest(last=True))


def test_the_kernel_checks_layers_itself(toy_model):
    runner = World(load(toy_model, "llama", "one call")).runner
    batch = pack([RaggedRow([5, 6, 7], 0, [1], 3, 1)], 16)
    paged_pass = new_pass(runner.model, batch, 3, runner.kv_cache.layers)
    for layer_idx in (-1, 2):
        wanted = ForwardRequest(hidden=HiddenStatesRequest(layer_inputs=(layer_idx,)), hidden_idx=batch.hidden_idx)
        with pytest.raises(IndexError, match="layer_inputs leads outside"):
            runner.model.run(batch.token_ids, batch.positions, paged_pass, wanted)


def test_without_indices_they_are_those_of_every_row(toy_model):
    """What a captured pass asks for."""
    for kind in ("one call", "by parts", "torch", "transformers"):
        model = load(toy_model, "llama", kind)
        runner = World(model).runner
        batch = pack([RaggedRow(A, 0, [1, 2, 3], 2, len(A))], 16)
        paged_pass = new_pass(model, batch, len(A), runner.kv_cache.layers)
        with torch.inference_mode():
            wanted = ForwardRequest(batch.logits_idx, None, hidden=request(model))
            got = model.run(batch.token_ids, batch.positions, paged_pass, wanted)
            expected = runner.forward(batch, hidden=request(model))
        assert torch.equal(got.logits, expected.logits)
        assert torch.equal(got.hidden_states.last, expected.hidden_states.last)
        for ours, theirs in zip(got.hidden_states.layer_inputs, expected.hidden_states.layer_inputs, strict=True):
            assert torch.equal(ours, theirs)


def test_a_model_that_does_not_show_its_layers_is_refused(toy_model):
    module = load(toy_model, "llama", "transformers").decoder.module
    layers = find_decoder_layers(module)
    assert [layer.self_attn.layer_idx for layer in layers] == [0, 1]

    class Hidden(nn.Module):
        config = module.config
        layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    with pytest.raises(ValueError, match="Hidden, which has no list of its 2 layers"):
        find_decoder_layers(Hidden())
