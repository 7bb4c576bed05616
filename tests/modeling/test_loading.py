"""What a LoadedModel says of itself."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from specpaged.modeling.linear import FastLinear
from specpaged.modeling.loaded_model import held_bytes
from specpaged.modeling.loading import load_model
from tests.modeling.families import VOCAB, save_toy
from tests.modeling.world import World, random_tokens


def test_facts_of_a_loaded_model(toy_path, toy_model):
    model = toy_model("qwen3")
    assert model.name == toy_path("qwen3")
    assert model.architecture == "Qwen3ForCausalLM"
    assert (model.dtype, model.device) == (torch.float32, torch.device("cpu"))
    assert (model.vocab_size, model.max_model_len, model.eos_token_ids) == (VOCAB, 1024, (2,))
    assert model.kv_spec.layers == ((2, 32), (2, 32))
    reference = transformers.AutoModelForCausalLM.from_pretrained(toy_path("qwen3"))
    assert model.num_parameters == reference.num_parameters()
    assert model.numerics_scheme.startswith("exact: linears ")
    assert toy_model("qwen3", numerics="fast").numerics_scheme.startswith("fast: ")


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_weight_bytes_are_those_held_also_by_linears(numerics, toy_model):
    """Embedding and output layer are tied, and the latter keeps its own copy."""
    model = toy_model("qwen3", numerics=numerics, model_impl="transformers", attention_backend="torch")
    frequencies = sum(buffer.nbytes for buffer in model.decoder.buffers())
    assert frequencies > 0
    assert model.weight_bytes == 4 * (model.num_parameters + VOCAB * model.hf_config.hidden_size) + frequencies


def test_weight_bytes_of_a_linear_with_two_layouts_count_both():
    layer = FastLinear(torch.randn(1024, 1024), torch.randn(1024))
    copies = 1 + (layer.packed is not None)
    assert held_bytes(torch.nn.ModuleList([layer, layer])) == 4 * (copies * 1024 * 1024 + 1024)


def test_eos_ids_are_generation_configs_list(tmp_path):
    path = save_toy("llama", tmp_path)
    file = Path(path) / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": [5, 7]}))
    assert load_model(path).eos_token_ids == (5, 7)


@pytest.mark.parametrize(("stored", "loaded"), [("float16", "float32"), ("bfloat16", "bfloat16")])
def test_dtype_auto_is_the_checkpoints_but_float16_becomes_float32(stored, loaded, tmp_path):
    path = save_toy("llama", tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, stored))
    model.save_pretrained(tmp_path / "stored")
    assert load_model(str(tmp_path / "stored")).dtype == getattr(torch, loaded)


def test_rope_frequencies_stay_float32(toy_model, toy_path):
    model = toy_model("qwen3", dtype="bfloat16", model_impl="transformers")
    buffers = dict(model.decoder.module.named_buffers())
    reference = transformers.AutoModelForCausalLM.from_pretrained(toy_path("qwen3"))
    assert buffers["model.rotary_emb.inv_freq"].dtype == torch.float32
    assert torch.equal(buffers["model.rotary_emb.inv_freq"], reference.model.rotary_emb.inv_freq)


def test_sharded_checkpoint(tmp_path, toy_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(toy_path("llama"))
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert load_model(str(tmp_path)).num_parameters == model.num_parameters()


def test_filler_rows_are_counted_and_write_nothing(toy_model):
    model = toy_model("qwen3", attention_backend="torch")
    world = World(model, block_size=4)
    world.run(("a", random_tokens(5, 0), 1))
    multiple = model.row_multiple
    assert multiple > 1
    assert world.runner.filler_rows == -5 % multiple + -1 % multiple  # of the pass, and of its logits
    owned = set(world.owned_slots()) | set(range(4))
    for layer in world.cache.layers:
        assert not layer[sorted(owned)].isnan().any()
        assert (layer[:4] == 0).all()
        assert layer[[slot for slot in range(len(layer)) if slot not in owned]].isnan().all()


def test_passes_without_logits_and_with_some(toy_model):
    world = World(toy_model("qwen3"))
    got = world.run(("a", random_tokens(5, 0), 0), ("b", random_tokens(6, 1), 2), ("c", random_tokens(1, 2), 1))
    assert [tuple(got[name].shape) for name in "abc"] == [(0, VOCAB), (2, VOCAB), (1, VOCAB)]
    assert got["b"].dtype == torch.float32
    assert world.run(("a", random_tokens(5, 0), 0))["a"].shape == (0, VOCAB)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_rope_does_not_follow_the_longest_mate(kind, tmp_path):
    if kind == "longrope":
        path = save_toy("phi3_longrope", tmp_path)
        limits = (24, 1024)
    else:
        rope = dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0)
        path = save_toy("llama", tmp_path, max_position_embeddings=32, rope_parameters=rope)
        limits = (32, 64)
    tokens = random_tokens(20, 1)
    rows = {}
    for limit in limits:
        model = load_model(path, max_model_len=limit)
        alone = World(model).run(("a", tokens, 20))["a"]
        if limit > 32:
            world = World(model)
            beside = world.run(("m", random_tokens(50, 2), 1), ("a", tokens, 20))["a"]
            assert torch.equal(alone, beside)
        rows[limit] = alone
    # Within the original length the frequencies are those of transformers; past it they are others.
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    assert (rows[limits[0]] - expected).abs().max() < 1e-4
    assert (rows[limits[1]] - expected).abs().max() > 1e-2
