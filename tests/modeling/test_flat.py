"""The flat decoder computes what transformers' own modules compute, and is refused where it would not."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import transformers

from specpaged import LLM, SamplingParams
from specpaged.modeling.flat import config as flat_families
from specpaged.modeling.flat import weights
from specpaged.modeling.flat.cpp_decoder import CppDecoder
from specpaged.modeling.flat.decoder import FlatDecoder
from specpaged.modeling.flat.source import FlatSource, halves_apart
from specpaged.modeling.flat.weights import Checkpoint, expected_shapes
from specpaged.modeling.linear import runs_cpp
from specpaged.modeling.loading import load_model
from specpaged.modeling.ragged_batch import RaggedRow, pack
from specpaged_kernels.cpu import linear as cpu_linear
from tests.kernels.cpu.test_linear import NARROW
from tests.modeling.families import FAMILIES, save_toy, toy_config
from tests.modeling.world import World, random_tokens

FLAT = [name for name in FAMILIES if toy_config(name).model_type in flat_families.FAMILIES]


def greedy(path: str, model_impl: str, **arguments) -> list[list[int]]:
    llm = LLM(path, model_impl=model_impl, max_model_len=64, **arguments)
    assert llm.engine.target.model.implementation == model_impl
    prompts = [{"prompt_token_ids": random_tokens(5 + i % 23, i)} for i in range(64)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_every_flat_family_has_a_toy():
    assert {toy_config(name).model_type for name in FLAT} == set(flat_families.FAMILIES)


@pytest.mark.parametrize("name", FLAT)
def test_greedy_tokens_of_64_prompts_are_those_of_transformers_modules(name, toy_path):
    path = toy_path(name)
    assert greedy(path, "flat") == greedy(path, "transformers")


@pytest.mark.parametrize("backend", ["torch", "cpp"])
@pytest.mark.parametrize("name", FLAT)
def test_logits_are_transformers(name, backend, toy_path, toy_model):
    reference = transformers.AutoModelForCausalLM.from_pretrained(toy_path(name), attn_implementation="eager").eval()
    tokens = random_tokens(70, 5)
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    model = toy_model(name, model_impl="flat", attention_backend=backend)
    assert model.backend == backend
    got = World(model, block_size=4).run(("a", tokens, 70))["a"]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


VARIANTS = {
    "untied": ("qwen3", {"tie_word_embeddings": False}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "no grouped query heads": ("qwen2", {"num_key_value_heads": 4}),
    "one KV head": ("mistral", {"num_key_value_heads": 1}),
    "biases everywhere": ("smollm3", {"attention_bias": True, "mlp_bias": True}),
    "biases and interleaved RoPE": ("glm4", {"attention_bias": True}),
    "another activation": ("llama", {"hidden_act": "relu"}),
    "tanh GELU": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama3 RoPE": (
        "llama",
        {
            "rope_parameters": dict(
                rope_type="llama3",
                rope_theta=500000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            )
        },
    ),
    "windows in some layers": ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "odd sizes": ("llama", {"vocab_size": 131, "intermediate_size": 93, "hidden_size": 60, "head_dim": 10}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_a_family(variant, tmp_path):
    name, overrides = VARIANTS[variant]
    path = save_toy(name, tmp_path, **overrides)
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    tokens = random_tokens(50, 1)
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    for backend in ("torch", "cpp"):
        model = load_model(path, model_impl="flat", attention_backend=backend)
        got = World(model).run(("a", tokens, 50))["a"]
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


def test_sharded_checkpoints_are_read_shard_by_shard(tmp_path, toy_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(toy_path("llama"))
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    tokens = random_tokens(20, 1)
    sharded, whole = (
        World(load_model(path, model_impl="flat")).run(("a", tokens, 20))["a"]
        for path in (str(tmp_path), toy_path("llama"))
    )
    assert torch.equal(sharded, whole)


def test_what_is_expected_of_a_checkpoint_is_what_transformers_saves(toy_path):
    for name in FLAT:
        config = transformers.AutoConfig.from_pretrained(toy_path(name))
        saved = Checkpoint(toy_path(name)).shapes
        assert expected_shapes(flat_families.flat_config(config)) == saved, name


def test_interleaved_pairs_become_halves():
    """Two heads of six dimensions, of which four are rotated: pairs (0, 1) and (2, 3) become (0, 2) and (1, 3)."""
    rows = torch.arange(12)
    assert halves_apart(rows, 2, 4).tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]
    assert halves_apart(rows[:, None].repeat(1, 3), 2, 4)[:, 2].tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]


def test_the_last_layer_runs_wanted_rows_only(toy_model):
    model = toy_model("llama", model_impl="flat", attention_backend="torch")
    seen = []
    hook = model.decoder.layers[-1].down.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    try:
        World(model).run(("a", random_tokens(40, 1), 2), ("b", random_tokens(9, 1), 1))
    finally:
        hook.remove()
    assert seen == [3 + -3 % model.row_multiple]


@pytest.mark.parametrize("name", ["olmo2", "qwen3_moe", "gpt_oss"])
def test_other_families_run_in_transformers_modules_and_the_report_says_why(name, toy_path):
    llm = LLM(toy_path(name), max_model_len=64)
    reason = "there is no flat decoder for model_type"
    assert llm.engine.target.model.implementation == "transformers"
    assert f"transformers ({reason}" in str(llm.report)
    with pytest.raises(ValueError, match=f"model_impl='flat' cannot run .*{reason}.*allowed: 'transformers'"):
        load_model(toy_path(name), model_impl="flat")


def test_the_report_names_the_flat_decoder(toy_path):
    assert "decoder flat, kernels cpp\n" in str(LLM(toy_path("qwen3"), max_model_len=64).report)


def test_an_unknown_implementation_is_refused(toy_path):
    with pytest.raises(ValueError, match="model_impl='fast' is not known; allowed: 'auto', 'flat', 'transformers'"):
        LLM(toy_path("qwen3"), model_impl="fast")


FOREIGN = {
    "llama with a window": ("llama", {"sliding_window": 8}),
    "llama with layer types": ("llama", {"sliding_window": 8, "layer_types": ["sliding_attention"] * 2}),
    "granite with a window": ("granite", {"sliding_window": 8}),
    "glm4 with a window": ("glm4", {"sliding_window": 8}),
    "mistral that says not to": ("mistral", {"use_sliding_window": False}),
    "phi3 that says not to": ("phi3", {"sliding_window": 8, "use_sliding_window": False}),
    "llama with layers without RoPE": ("llama", {"no_rope_layers": [0, 1]}),
    "qwen2 with a window not in use": ("qwen2", {"use_sliding_window": False, "sliding_window": 8}),
    "gemma3 with soft-capping": ("gemma3", {"attn_logit_softcapping": 2.0}),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_attributes_that_a_familys_code_does_not_read_mean_nothing(case, tmp_path):
    """A config may hold any attribute, those of other families too."""
    name, attributes = FOREIGN[case]
    path = save_toy(name, tmp_path)
    file = Path(path) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **attributes}))
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    tokens = random_tokens(40, 1)
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    got = World(load_model(path, model_impl="flat")).run(("a", tokens, 40))["a"]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


def test_rope_of_fewer_dimensions_than_the_family_has_is_not_flat(tmp_path):
    rope = dict(rope_type="linear", rope_theta=10000.0, factor=2.0, partial_rotary_factor=0.5)
    path = save_toy("llama", tmp_path)
    file = Path(path) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "rope_parameters": rope}))
    with pytest.raises(ValueError, match="its RoPE turns 8 of a head's 16 dimensions"):
        load_model(path, model_impl="flat")


def test_files_that_cannot_be_had_are_a_reason(toy_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("no network\nand more")

    monkeypatch.setattr(weights, "snapshot_download", fail)
    monkeypatch.setattr(weights.Path, "is_dir", lambda self: False)
    config = transformers.AutoConfig.from_pretrained(toy_path("llama"))
    got = FlatSource.open("owner/name", config, None, torch.device("cpu"), 64, False)
    assert got == "its safetensors cannot be had: no network"


@pytest.mark.parametrize(("name", "value"), [("token_ids", 10**6), ("token_ids", -1), ("positions", 10**6)])
def test_an_index_outside_of_its_table_is_an_error(name, value, toy_model):
    model = toy_model("llama", model_impl="flat", attention_backend="cpp")
    runner = World(model).runner
    batch = pack([RaggedRow([5, 6, 7], 0, [1], 3)], 16)
    batch = dataclasses.replace(batch, **{name: torch.full((3,), value)})
    with pytest.raises(IndexError, match=f"{name} leads outside"):
        runner.forward(batch)


def test_a_checkpoint_with_more_than_its_config_names_is_not_flat(tmp_path):
    """Tied by its config, but with an output layer of its own."""
    path = save_toy("qwen3", tmp_path, tie_word_embeddings=False)
    file = Path(path) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tie_word_embeddings": True}))
    with pytest.raises(ValueError, match=r"the checkpoint also holds lm_head\.weight"):
        load_model(path, model_impl="flat")


def test_code_of_its_own_is_not_flat(toy_path):
    config = transformers.AutoConfig.from_pretrained(toy_path("llama"))
    config.auto_map = {"AutoModelForCausalLM": "modeling_own.Own"}
    assert "code of its own" in flat_families.why_not(config, trust_remote_code=True)
    assert flat_families.why_not(config, trust_remote_code=False) is None


def test_weights_are_held_once(toy_path):
    """What the checkpoint has, an embedding beside the tied output layer, and RoPE's table."""
    model = load_model(toy_path("qwen3"), model_impl="flat", max_model_len=64)
    table = sum(buffer.nbytes for buffer in model.decoder.buffers())
    assert table == 2 * 64 * 16 * 4
    config = model.hf_config
    per_head = config.num_hidden_layers * (4 + 2 - 2) * 32  # a head's norm is held for each head
    assert model.weight_bytes == 4 * (model.num_parameters + 128 * config.hidden_size + per_head) + table


@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FLAT)
def test_one_call_computes_what_its_parts_do_bit_for_bit(name, dtype, numerics, toy_model):
    model = toy_model(name, dtype=dtype, numerics=numerics, model_impl="flat", attention_backend="cpp")
    if not runs_cpp(model.dtype, model.device):
        assert isinstance(model.decoder, FlatDecoder)  # oneDNN has units for it, and comes first
        return
    assert isinstance(model.decoder, CppDecoder)
    assert model.row_multiple == 1 or model.decoder.decoder.final_softcap is not None
    by_parts = dataclasses.replace(model, decoder=model.decoder.decoder)
    worlds = World(model, block_size=4), World(by_parts, block_size=4)
    a, b = random_tokens(60, 1), random_tokens(50, 2)
    for step in (
        [("a", a[:30], 0)],
        [("a", a[30:33], 3), ("b", b[:40], 2)],
        [("a", a[33:34], 1), ("b", b[40:41], 1)],
        [("b", b[41:47], 6)],
        [("a", a[34:35], 1)],
    ):
        got, expected = (world.run(*step) for world in worlds)
        for seq in got:
            assert torch.equal(got[seq], expected[seq]), (seq, len(step))


@pytest.mark.parametrize("stored", NARROW)
@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("name", FLAT)
def test_weights_stored_in_16_bits_give_the_logits_of_the_same_weights_in_32(
    name, numerics, stored, toy_path, tmp_path, monkeypatch
):
    transformers.AutoModelForCausalLM.from_pretrained(toy_path(name), dtype=stored).save_pretrained(tmp_path)
    options = {"dtype": "float32", "numerics": numerics, "model_impl": "flat", "attention_backend": "cpp"}
    narrow = load_model(str(tmp_path), **options)
    assert narrow.storage == str(stored).removeprefix("torch.")
    monkeypatch.setattr(cpu_linear, "stored_dtype", lambda weight: weight.dtype)
    monkeypatch.setattr(FlatSource, "_stored_embedding", lambda self: self._read(weights.EMBEDDING)[weights.EMBEDDING])
    wide = load_model(str(tmp_path), **options)
    assert wide.storage == ""
    assert narrow.weight_bytes < (0.7 if numerics == "exact" else 0.9) * wide.weight_bytes
    assert isinstance(narrow.decoder, CppDecoder)
    worlds = World(narrow, block_size=4), World(wide, block_size=4)
    a, b = random_tokens(60, 1), random_tokens(50, 2)
    for step in ([("a", a[:30], 3), ("b", b[:40], 2)], [("a", a[30:31], 1)], [("a", a[31:38], 7), ("b", b[40:41], 1)]):
        got, expected = (world.run(*step) for world in worlds)
        assert all(torch.equal(got[seq], expected[seq]) for seq in got), len(step)


def test_a_decoder_with_other_parts_runs_them(toy_path, tmp_path):
    for model in (
        load_model(toy_path("llama"), model_impl="flat", attention_backend="torch"),
        load_model(save_toy("llama", tmp_path, hidden_act="relu"), model_impl="flat", attention_backend="cpp"),
    ):
        assert isinstance(model.decoder, FlatDecoder)
