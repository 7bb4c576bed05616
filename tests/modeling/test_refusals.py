"""What cannot be loaded is refused in a sentence that names the argument or the file, its value and what is allowed."""

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from specpaged.modeling.loading import load_model, load_tokenizer
from tests.modeling.families import SIZES, save_toy


@pytest.fixture
def copy(toy_path, tmp_path):
    """A private copy of the toy Llama checkpoint, to break."""
    return Path(shutil.copytree(toy_path("llama"), tmp_path / "broken"))


def edit_config(directory: Path, **changes) -> str:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, **changes}))
    return str(directory)


def test_missing_directory(tmp_path):
    with pytest.raises(ValueError, match=r"model '.*nowhere' does not exist; it must be a local directory or a hub id"):
        load_model(str(tmp_path / "nowhere"))


def test_file_instead_of_a_directory(tmp_path):
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(ValueError, match=r"is a file"):
        load_model(str(path))


@pytest.mark.parametrize("model", ["", None, 3])
def test_model_of_another_type(model):
    with pytest.raises(ValueError, match=r"model must be a local directory or a hub id"):
        load_model(model)


def test_hub_id_without_network():
    with pytest.raises(ValueError, match=r"'nobody/nothing' is no local directory.*hub"):
        load_model("nobody/nothing")


def test_missing_config(copy):
    (copy / "config.json").unlink()
    with pytest.raises(ValueError, match=r"has no config.json"):
        load_model(str(copy))


def test_config_that_is_no_json(copy):
    (copy / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is not valid JSON"):
        load_model(str(copy))


def test_unknown_model_type(copy):
    with pytest.raises(ValueError, match=r"config.json cannot be used.*no_such_type"):
        load_model(edit_config(copy, model_type="no_such_type"))


def test_a_config_class_may_raise_anything(copy, monkeypatch):
    """As Mamba's does of keys that it does not know."""
    from transformers import AutoConfig

    for error in (AttributeError("no attribute 'foreign'"), TypeError("an int"), ZeroDivisionError("by zero")):

        def raising(*_arguments, error=error, **_options):
            raise error

        monkeypatch.setattr(AutoConfig, "from_pretrained", raising)
        with pytest.raises(ValueError, match=rf"^model '{copy}': config.json cannot be used: {error}"):
            load_model(str(copy))


def test_missing_weights(copy):
    (copy / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model.safetensors is missing"):
        load_model(str(copy))


def test_missing_shard(copy):
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-00002.safetensors"}}))
    with pytest.raises(ValueError, match=r"model-00002.safetensors is missing"):
        load_model(str(copy))


def test_pickle_checkpoint(copy):
    torch.save(load_file(copy / "model.safetensors"), copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"pickle \(pytorch_model.bin\).*safetensors"):
        load_model(str(copy))


@pytest.mark.parametrize("keep", [4, 100, -1, -5000])
def test_truncated_safetensors(copy, keep):
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model.safetensors is (truncated|no safetensors)"):
        load_model(str(copy))


def test_safetensors_with_something_behind(copy):
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(ValueError, match=r"longer than its header says"):
        load_model(str(copy))


def test_safetensors_header_that_is_no_json(copy):
    (copy / "model.safetensors").write_bytes(struct.pack("<Q", 8) + b"no json!")
    with pytest.raises(ValueError, match=r"header cannot be read"):
        load_model(str(copy))


def test_missing_unexpected_and_mismatched_tensors(copy):
    path = copy / "model.safetensors"
    tensors = load_file(path)
    tensors.pop("model.layers.0.mlp.up_proj.weight")
    tensors["model.layers.0.mlp.extra.weight"] = torch.zeros(3)
    tensors["model.norm.weight"] = torch.zeros(5)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"not those of LlamaForCausalLM.*missing \(model.layers.0.mlp.up_proj") as e:
        load_model(str(copy))
    assert "unexpected (model.layers.0.mlp.extra.weight)" in str(e.value)
    assert "of another shape (model.norm.weight)" in str(e.value)


def test_config_that_names_another_architecture(copy):
    config = dict(model_type="qwen3", architectures=["Qwen3ForCausalLM"], head_dim=16)
    with pytest.raises(ValueError, match=r"not those of Qwen3ForCausalLM"):
        load_model(edit_config(copy, **config))


def test_architectures_and_model_type_that_contradict_each_other(copy):
    with pytest.raises(ValueError, match=r"names the architecture MistralForCausalLM.*'llama'"):
        load_model(edit_config(copy, architectures=["MistralForCausalLM"]))


def test_encoder_decoder(tmp_path):
    config = transformers.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"T5ForConditionalGeneration.*encoder-decoder"):
        load_model(str(tmp_path))


def test_latent_attention(tmp_path):
    config = transformers.DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4},
        kv_lora_rank=8,
        q_lora_rank=8,
        n_routed_experts=2,
        n_group=1,
        topk_group=1,
    )
    save_config(config, "DeepseekV3ForCausalLM", tmp_path)
    with pytest.raises(ValueError, match=r"DeepseekV3ForCausalLM.*multi-head latent attention"):
        load_model(str(tmp_path))


def test_linear_attention(tmp_path):
    config = transformers.Qwen3NextConfig(**{**SIZES, "num_hidden_layers": 4}, num_experts=2)
    save_config(config, "Qwen3NextForCausalLM", tmp_path)
    with pytest.raises(ValueError, match=r"Qwen3NextForCausalLM.*layers of type linear_attention"):
        load_model(str(tmp_path))


def test_state_space_model(tmp_path):
    config = transformers.MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1)
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"\(Mamba\w+|\(mamba\)"):
        load_model(str(tmp_path), max_model_len=64)


def test_attention_that_does_not_go_through_the_hook(tmp_path):
    config = transformers.BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2)
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"(?i)bloom.*not supported"):
        load_model(str(tmp_path), max_model_len=64)


@pytest.mark.parametrize(("dtype", "slope"), [("float32", 0.01), ("bfloat16", 1.0)])
def test_position_biases_outside_the_hook(dtype, slope, monkeypatch, copy):
    """An architecture that adds to attention what the hook never sees differs from its eager self. In bfloat16, by
    about a quarter."""
    from transformers.models.llama import modeling_llama

    eager = modeling_llama.eager_attention_forward

    def with_bias(module, query, key, value, attention_mask, scaling, **kwargs):
        mask = attention_mask + torch.linspace(0, slope, key.shape[2], dtype=key.dtype)
        return eager(module, query, key, value, mask, scaling, **kwargs)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", with_bias)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM.*eager attention"):
        load_model(str(copy), dtype=dtype, model_impl="transformers")


def test_positions_that_are_wrong_past_a_prefill(monkeypatch, copy):
    """A model that counts positions from the start of each pass is right in a prefill alone."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    honest = LlamaRotaryEmbedding.forward

    def from_the_start(self, x, position_ids):
        return honest(self, x, position_ids - position_ids[:, :1])

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", from_the_start)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM.*eager attention"):
        load_model(str(copy), numerics="fast", model_impl="transformers")


def save_model(config, directory: Path) -> str:
    """Random weights that are far from zero: by transformers' own a wrong layer hardly shows."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=1.5 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(directory)
    return str(directory)


EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=48, shared_expert_intermediate_size=48)
WINDOWS_IN_THE_MASK = {
    "Qwen2Moe": dict(use_sliding_window=True, max_window_layers=2, num_experts=4, **EXPERTS),
    "Phimoe": dict(num_local_experts=4, rope_parameters=dict(rope_type="default", rope_theta=10000.0)),
}


@pytest.mark.parametrize("name", WINDOWS_IN_THE_MASK)
def test_sliding_windows_in_the_mask_alone(name, tmp_path):
    config = getattr(transformers, f"{name}Config")(**SIZES, sliding_window=8, **WINDOWS_IN_THE_MASK[name])
    path = save_model(config, tmp_path)
    with pytest.raises(ValueError, match=rf"{name}ForCausalLM.*layer 0 hands sliding_window=None.*config says 8"):
        load_model(path)
    assert load_model(path, max_model_len=8).max_model_len == 8  # no sequence outgrows the window


def test_forward_without_positions(tmp_path):
    config = transformers.BartConfig(
        vocab_size=64, d_model=32, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=48
    )
    with pytest.raises(ValueError, match=r"BartForCausalLM.*its forward has no argument position_ids"):
        load_model(save_model(config, tmp_path), numerics="fast")


def test_attention_mask_of_the_models_own(tmp_path):
    with pytest.raises(ValueError, match=r"DogeForCausalLM.*attention mask of its own"):
        load_model(save_model(transformers.DogeConfig(**SIZES), tmp_path), numerics="fast", dtype="bfloat16")


def test_attention_that_is_not_causal(tmp_path):
    config = transformers.CamembertConfig(**SIZES)
    with pytest.raises(ValueError, match=r"CamembertForCausalLM.*not causal"):
        load_model(save_model(config, tmp_path), numerics="fast", dtype="bfloat16")


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_code_that_fails_with_our_layers(numerics, monkeypatch, copy):
    """Ours have no weight in the layout of nn.Linear's."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    honest = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: honest(self, x.to(self.up_proj.weight.dtype)))
    with pytest.raises(ValueError, match=r"LlamaForCausalLM.*forward fails.*AttributeError: .*'weight'"):
        load_model(str(copy), numerics=numerics, model_impl="transformers")


def test_quantized_weights(copy):
    with pytest.raises(ValueError, match=r"quantized"):
        load_model(edit_config(copy, quantization_config={"quant_method": "fp8"}))


@pytest.mark.parametrize("dtype", ["float64", "int8", "half", None])
def test_unknown_dtype(copy, dtype):
    with pytest.raises(ValueError, match=r"dtype must be one of auto, float32, bfloat16, float16, got"):
        load_model(str(copy), dtype=dtype)


def test_float16_on_a_cpu(copy):
    with pytest.raises(ValueError, match=r"dtype 'float16' is not supported on a CPU; use 'float32'"):
        load_model(str(copy), dtype="float16")


def test_unknown_numerics(copy):
    with pytest.raises(ValueError, match=r"numerics must be one of exact, fast, got 'precise'"):
        load_model(str(copy), numerics="precise")


@pytest.mark.parametrize("device", ["tpu", "mps", 5.5])
def test_unknown_device(copy, device):
    with pytest.raises(ValueError, match=r"device must be 'cpu' or"):
        load_model(str(copy), device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_cuda(copy):
    with pytest.raises(ValueError, match=r"no CUDA device"):
        load_model(str(copy), device="cuda")


@pytest.mark.parametrize("length", [0, -3, 2.5, True])
def test_max_model_len_that_is_no_length(copy, length):
    with pytest.raises(ValueError, match=r"max_model_len must be an integer of at least 1"):
        load_model(str(copy), max_model_len=length)


def test_max_model_len_past_the_positions(copy):
    with pytest.raises(ValueError, match=r"max_model_len must be at most the 1024 positions"):
        load_model(str(copy), max_model_len=1025)


def test_missing_and_broken_tokenizer(copy):
    assert load_tokenizer(str(copy)) is None
    (copy / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"has no tokenizer that can be loaded"):
        load_tokenizer(str(copy))


def test_kv_cache_of_another_model(toy_model):
    from specpaged.modeling.model_runner import ModelRunner
    from specpaged.paging.kv_cache import PagedKVCache

    qwen, llama = toy_model("qwen3"), toy_model("llama")
    cache = PagedKVCache(qwen.kv_spec, 4, 4, torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"kv_cache must have the model's layers"):
        ModelRunner(llama, cache)


def save_config(config, architecture: str, directory: Path) -> None:
    config.architectures = [architecture]
    config.save_pretrained(directory)
    save_file({"weight": torch.zeros(1)}, directory / "model.safetensors")


def test_toy_directories_load_at_all(tmp_path):
    """Guards the tests above: what they break is loadable unbroken."""
    assert load_model(save_toy("llama", tmp_path)).architecture == "LlamaForCausalLM"
