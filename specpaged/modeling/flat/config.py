"""What a family's configuration means, in the terms of the one flat decoder."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from specpaged.modeling.families import LayerGeometry
from specpaged.modeling.rope import freeze_rope

ROPE = "all"  # the key of frequencies that all layers share


@dataclass(frozen=True)
class LayerConfig:
    """What differs between the layers of a model."""

    window: int | None  # a token reads itself and the window - 1 tokens before it
    rope: str | None  # the key of its frequencies in `rotary_frequencies`; None: none


@dataclass(frozen=True)
class NormNames:
    """Tensors of a layer; each norm stands before or after attention or MLP, and those after are rare."""

    before_attention: str = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str | None = None


GLM4_NORMS = NormNames(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")
GEMMA_NORMS = NormNames(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


@dataclass(frozen=True)
class FlatConfig:
    """A decoder: embedding, layers of norm, attention, norm and gated MLP, norm, output layer."""

    architecture: str
    layers: tuple[LayerConfig, ...]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    tied: bool  # the output layer's weight is the embedding
    activation: str = "silu"  # of the gate; a key of transformers' ACT2FN
    norms: NormNames = NormNames()
    norm_offset: float = 0.0  # that stored norm weights lack
    qk_norm: bool = False  # an RMS norm over each head of query and key, before RoPE
    fused_qkv: bool = False  # in the checkpoint; here they always are
    fused_gate_up: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    partial_rope: bool = False  # the family may rotate fewer dimensions than head_dim
    interleaved_rope: bool = False  # pairs are (0, 1), (2, 3) ..., in the checkpoint; here (i, i + half)
    scaling: float | None = None  # of attention scores; default 1 / sqrt(head_dim)
    softcap: float | None = None
    embedding_multiplier: float = 1.0
    rounds_embedding_multiplier: bool = False  # to the model's dtype, before it multiplies
    residual_multiplier: float = 1.0  # of what attention and MLP add
    logits_divisor: float = 1.0
    final_softcap: float | None = None

    @property
    def geometry(self) -> LayerGeometry:
        """The heads that every layer hands to attention."""
        return LayerGeometry(self.num_heads, self.num_kv_heads, self.head_dim)


def _window_of_all(config: PreTrainedConfig) -> dict:
    return {"layers": tuple(LayerConfig(config.sliding_window, ROPE) for _ in range(config.num_hidden_layers))}


def _by_layer_types(config: PreTrainedConfig, ropes_by_type: bool = False) -> dict:
    return {
        "layers": tuple(
            LayerConfig(config.sliding_window if kind == "sliding_attention" else None, kind if ropes_by_type else ROPE)
            for kind in config.layer_types
        )
    }


def _llama(config: PreTrainedConfig) -> dict:
    return {"qkv_bias": config.attention_bias, "o_bias": config.attention_bias, "mlp_bias": config.mlp_bias}


def _qwen3(config: PreTrainedConfig) -> dict:
    biases = {"qkv_bias": config.attention_bias, "o_bias": config.attention_bias}
    return biases | {"qk_norm": True} | _by_layer_types(config)


def _phi3(config: PreTrainedConfig) -> dict:
    return {"fused_qkv": True, "fused_gate_up": True, "partial_rope": True} | _window_of_all(config)


def _smollm3(config: PreTrainedConfig) -> dict:
    layers = _by_layer_types(config)["layers"]
    uses_rope = zip(layers, config.no_rope_layers, strict=True)
    windows = config.use_sliding_window
    return _llama(config) | {
        "layers": tuple(LayerConfig(x.window if windows else None, ROPE if rope else None) for x, rope in uses_rope)
    }


def _glm4(config: PreTrainedConfig) -> dict:
    return {
        "qkv_bias": config.attention_bias,
        "interleaved_rope": True,
        "partial_rope": True,
        "fused_gate_up": True,
        "norms": GLM4_NORMS,
    }


def _granite(config: PreTrainedConfig) -> dict:
    return _llama(config) | {
        "scaling": config.attention_multiplier,
        "embedding_multiplier": config.embedding_multiplier,
        "residual_multiplier": config.residual_multiplier,
        "logits_divisor": config.logits_scaling,
    }


def _gemma2(config: PreTrainedConfig) -> dict:
    return _gemma(config) | _by_layer_types(config) | {"softcap": config.attn_logit_softcapping}


def _gemma3(config: PreTrainedConfig) -> dict:
    return _gemma(config) | _by_layer_types(config, ropes_by_type=True) | {"qk_norm": True}


def _gemma(config: PreTrainedConfig) -> dict:
    return {
        "qkv_bias": config.attention_bias,
        "o_bias": config.attention_bias,
        "activation": config.hidden_activation,
        "norms": GEMMA_NORMS,
        "norm_offset": 1.0,
        "scaling": config.query_pre_attn_scalar**-0.5,
        "embedding_multiplier": config.hidden_size**0.5,
        "rounds_embedding_multiplier": True,
        "final_softcap": config.final_logit_softcapping,
    }


# model_type -> (architecture, what its config says beyond the sizes). Only what the family's own code reads counts:
# a config may hold any other attribute.
FAMILIES: dict[str, tuple[str, Callable[[PreTrainedConfig], dict]]] = {
    "llama": ("LlamaForCausalLM", _llama),
    "mistral": ("MistralForCausalLM", _window_of_all),
    "qwen2": ("Qwen2ForCausalLM", lambda config: {"qkv_bias": True} | _by_layer_types(config)),
    "qwen3": ("Qwen3ForCausalLM", _qwen3),
    "glm4": ("Glm4ForCausalLM", _glm4),
    "phi3": ("Phi3ForCausalLM", _phi3),
    "granite": ("GraniteForCausalLM", _granite),
    "smollm3": ("SmolLM3ForCausalLM", _smollm3),
    "gemma2": ("Gemma2ForCausalLM", _gemma2),
    "gemma3_text": ("Gemma3ForCausalLM", _gemma3),
}


def why_not(config: PreTrainedConfig, trust_remote_code: bool) -> str | None:
    """Why the flat decoder does not run models of this configuration; None if it does."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        return f"there is no flat decoder for model_type {config.model_type!r}"
    architecture, _ = family
    if (getattr(config, "architectures", None) or [architecture]) != [architecture]:
        return f"architectures {config.architectures} is not [{architecture!r}]"
    if trust_remote_code and getattr(config, "auto_map", None):
        return "it brings code of its own, and trust_remote_code is set"
    activation = flat_config(config).activation
    if activation not in ACT2FN:
        return f"activation {activation!r} is not known"
    return None


def flat_config(config: PreTrainedConfig) -> FlatConfig:
    """The configuration of a model of one of FAMILIES, in our terms."""
    architecture, own = FAMILIES[config.model_type]
    options = {
        "activation": getattr(config, "hidden_act", None),
        "layers": (LayerConfig(None, ROPE),) * config.num_hidden_layers,
    }
    return FlatConfig(
        architecture=architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        norm_eps=config.rms_norm_eps,
        tied=config.tie_word_embeddings,
        **options | own(config),
    )


def rotary_frequencies(config: PreTrainedConfig, max_model_len: int) -> dict[str, tuple[Tensor, float]]:
    """Inverse frequencies [R / 2] float32 of the R rotated dimensions, and the factor on cos and sin, by key.

    They are transformers' own, with those that would follow a pass's longest position fixed: see `freeze_rope`.
    """
    architecture, _ = FAMILIES[config.model_type]
    module = sys.modules[getattr(transformers, architecture).__module__]
    with torch.device("cpu"):
        rotary = getattr(module, architecture.replace("ForCausalLM", "RotaryEmbedding"))(config)
    freeze_rope(rotary, max_model_len)
    if isinstance(rotary.rope_type, str):
        return {ROPE: (rotary.inv_freq, rotary.attention_scaling)}
    return {
        kind: (getattr(rotary, f"{kind}_inv_freq"), getattr(rotary, f"{kind}_attention_scaling"))
        for kind in rotary.rope_type
    }
