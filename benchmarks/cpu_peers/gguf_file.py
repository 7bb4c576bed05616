"""A checkpoint of Qwen3's family as a GGUF file without a vocabulary: token ids go in and come out."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
from safetensors.numpy import load_file

# By the names of transformers, of one layer and of the whole.
_OF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OTHERS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write(checkpoint: Path, path: Path) -> None:
    """Matrices become float16, norms float32. Raises ValueError for another family."""
    config = json.loads((checkpoint / "config.json").read_text())
    if config["model_type"] != "qwen3":
        raise ValueError(f"model_type={config['model_type']!r}; allowed: 'qwen3'")
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for file in sorted(checkpoint.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            writer.add_tensor(_name(name), tensor.astype("float16" if tensor.ndim > 1 else "float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name(name: str) -> str:
    if name in _OTHERS:
        return _OTHERS[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_OF_LAYER[rest.removesuffix('.weight')]}.weight"
