"""What the config.json of heads means: EAGLE-3 in both of its spellings, and Clover."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig

from specpaged.modeling.flat.config import FlatConfig, flat_config
from specpaged.modeling.forward_output import HiddenStatesRequest

EAGLE3_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM", "Eagle3Speculator")
CLOVER_ARCHITECTURES = ("CloverForCausalLM",)
_SPECULATORS = "speculators_model_type"  # a key of that library's own config.json
_LLAMA_KEYS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers",
    "rms_norm_eps", "vocab_size", "hidden_act", "max_position_embeddings", "rope_parameters", "rope_theta",
    "rope_scaling", "attention_bias", "mlp_bias",
)  # fmt: skip


@dataclass(frozen=True)
class HeadsConfig:
    """Heads of a method, beside a target of `num_target_layers` layers and `target_hidden_size`.

    `flat` is their transformer layers, whose output layer has `vocab_size` rows: of EAGLE-3 its own ones. The flags
    are vLLM's: `norm_before_residual` (the layer adds to the normed features), `norm_before_fc` (one norm of all the
    target's hidden states), `fc_norm` (one of each), `norm_output` (the next pass reads what the final norm has left).
    """

    method: str
    hf_config: PreTrainedConfig
    flat: FlatConfig
    hidden_states: HiddenStatesRequest  # that they read of the target
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @classmethod
    def of(
        cls, method: str, config: Mapping[str, Any], num_target_layers: int, target_hidden_size: int, vocab_size: int
    ) -> HeadsConfig:
        """What a config.json says, beside a target whose embedding has `vocab_size` rows.

        Raises:
            ValueError: it is none of the method's, or asks for what is not done here; the message begins with the key.
        """
        is_speculators = _SPECULATORS in config
        layer = {**config.get("transformer_layer_config", {}), "model_type": "llama"} if is_speculators else config
        for key, value, allowed in _demands(method, config, layer):
            if value not in allowed:
                raise ValueError(f"{key}={value!r} is not supported; allowed: {', '.join(map(repr, allowed))}")
        llama = LlamaConfig(**{key: layer[key] for key in _LLAMA_KEYS if layer.get(key) is not None})
        architecture = (config.get("architectures") or [method])[0]
        flat = replace(flat_config(llama), architecture=architecture, tied=False)
        if flat.vocab_size != vocab_size:
            raise ValueError(f"vocab_size={flat.vocab_size} must be the target's {vocab_size} embedding rows")
        if method == "clover":
            if flat.hidden_size != target_hidden_size:
                raise ValueError(f"hidden_size={flat.hidden_size} must be the target's {target_hidden_size}")
            return cls(method, llama, flat, HiddenStatesRequest(last=True))
        # vLLM keeps what the authors' code has in eagle_config.
        flags = {**config, **(config.get("eagle_config") or {})}
        asked = flags.get("target_hidden_size") or flat.hidden_size
        if asked != target_hidden_size:
            raise ValueError(f"target_hidden_size={asked} must be the target's {target_hidden_size}")
        n = num_target_layers
        layer_ids = flags.get("eagle_aux_hidden_state_layer_ids") or (2, n // 2, n - 3)
        if not isinstance(layer_ids, list | tuple) or not all(type(layer_idx) is int for layer_idx in layer_ids):
            raise ValueError(f"eagle_aux_hidden_state_layer_ids={layer_ids!r} must be a list of ints")
        # In the order of the layers, however they are named: vLLM collects them on the way up.
        hidden_states = HiddenStatesRequest(layer_inputs=tuple(sorted(layer_ids)))
        try:
            hidden_states.check(n)
        except ValueError as error:
            raise ValueError(f"eagle_aux_hidden_state_layer_ids: {error}") from None
        draft_vocab_size = config.get("draft_vocab_size") or flat.vocab_size
        return cls(
            method,
            llama,
            replace(flat, vocab_size=draft_vocab_size),
            hidden_states,
            norm_before_residual=bool(flags.get("norm_before_residual", is_speculators)),
            norm_before_fc=bool(flags.get("norm_before_fc", False)),
            fc_norm=bool(flags.get("fc_norm", False)),
            norm_output=bool(flags.get("norm_output", False)),
        )


def _demands(
    method: str, config: Mapping[str, Any], layer: Mapping[str, Any]
) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Keys, their values, and those that are allowed."""
    if _SPECULATORS in config:
        yield _SPECULATORS, config[_SPECULATORS], (method,) if method == "eagle3" else ()
        of_layer = config.get("transformer_layer_config", {}).get("model_type", "llama")
        yield "transformer_layer_config.model_type", of_layer, ("llama",)
    else:
        architectures = CLOVER_ARCHITECTURES if method == "clover" else EAGLE3_ARCHITECTURES
        named = config.get("architectures") or [None]
        for architecture in [named] if isinstance(named, str) else named:
            yield "architectures", architecture, architectures
        yield "model_type", config.get("model_type"), ("llama", "clover" if method == "clover" else "llama")
    if method == "eagle3":
        eagle = config.get("eagle_config") or {}
        yield "num_hidden_layers", layer.get("num_hidden_layers", 1), (1,)
        yield "use_aux_hidden_state", eagle.get("use_aux_hidden_state", True), (True,)
        yield "logit_scale", config.get("logit_scale", 1.0), (1.0,)
        yield "pard_token", config.get("pard_token"), (None,)  # of parallel drafting
    for layer_type in layer.get("layer_types") or ():
        yield "layer_types", layer_type, ("full_attention",)
    yield "quantization_config", config.get("quantization_config"), (None,)
    yield "hidden_act", layer.get("hidden_act", "silu"), ("silu",)
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
        if not isinstance(layer.get(key), int):
            raise ValueError(f"{key}={layer.get(key)!r} must be an int")
