"""Toy configurations of the supported families: random weights, two to four layers, odd shapes on purpose."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

VOCAB = 128
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
WINDOW = 8
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
MOE = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=48)


def _longrope(original: int) -> dict:
    # head_dim 16: eight factors.
    return dict(
        rope_type="longrope",
        rope_theta=10000.0,
        short_factor=[1.0 + 0.05 * i for i in range(8)],
        long_factor=[2.0 + 0.3 * i for i in range(8)],
        original_max_position_embeddings=original,
    )


# name -> (config class, overrides)
FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("LlamaConfig", dict(mlp_bias=True, attention_bias=True)),
    "mistral": ("MistralConfig", dict(sliding_window=WINDOW, head_dim=24)),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", dict(head_dim=32, tie_word_embeddings=True)),
    "qwen3_moe": ("Qwen3MoeConfig", dict(head_dim=16, norm_topk_prob=True, **MOE)),
    "glm4": ("Glm4Config", dict(head_dim=16, partial_rotary_factor=0.5)),
    "glm4_moe": (
        "Glm4MoeConfig",
        dict(
            head_dim=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=48,
            n_shared_experts=1,
            first_k_dense_replace=1,
            n_group=2,
            topk_group=1,
        ),
    ),
    "gemma2": (
        "Gemma2Config",
        dict(
            head_dim=16,
            num_hidden_layers=3,
            layer_types=MIXED,
            sliding_window=WINDOW,
            query_pre_attn_scalar=24,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=3.0,
        ),
    ),
    "gemma3": (
        "Gemma3TextConfig",
        dict(head_dim=16, num_hidden_layers=3, layer_types=MIXED, sliding_window=WINDOW, final_logit_softcapping=3.0),
    ),
    "phi3": ("Phi3Config", {}),
    "phi3_longrope": ("Phi3Config", dict(original_max_position_embeddings=32, rope_parameters=_longrope(32))),
    "olmo2": ("Olmo2Config", {}),
    "granite": (
        "GraniteConfig",
        dict(embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.5, attention_multiplier=0.2),
    ),
    "gpt_oss": (
        "GptOssConfig",
        dict(
            head_dim=16,
            num_hidden_layers=3,
            layer_types=MIXED,
            sliding_window=WINDOW,
            num_local_experts=4,
            num_experts_per_tok=2,
            intermediate_size=40,
        ),
    ),
    "smollm3": ("SmolLM3Config", dict(num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0])),
}


def toy_config(name: str, **overrides: object) -> transformers.PreTrainedConfig:
    config_class, own = FAMILIES[name]
    return getattr(transformers, config_class)(**{**SIZES, **own, **overrides})


def save_toy(name: str, directory: Path, seed: int = 0, **overrides: object) -> str:
    """Random weights large enough that attention is far from uniform."""
    torch.manual_seed(seed)
    config = toy_config(name, **overrides)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=1.5 / parameter.shape[-1] ** 0.5)
            elif "sinks" in path or "bias" in path:
                parameter.normal_(std=0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    path = directory / name
    model.save_pretrained(path)
    return str(path)
