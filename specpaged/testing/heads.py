"""Checkpoints of draft heads with random weights, in the formats that are published: EAGLE-3's two, and Clover-2's.

Scales are chosen so that drafts vary from token to token and from draft to draft whatever the size of the target's
hidden states, that every weight and every norm has a say, and that the most likely token stands clear of the second.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig

FC_GAIN = 0.1  # on hidden states whose elements are often near 10
ADDED_GAIN = 4.0  # what a layer adds is of the size of what it is added to, or it would change nothing
ATTENTION_GAIN = 2.5  # scores far enough from each other that positions matter
LOGITS_GAIN = 4.0  # the standard deviation of a row of logits
VALUE_GAIN = 20.0  # of Clover's attention, whose cosines are small and whose embeddings may be, too
FAVOURED_GAIN = 4.0


def write_eagle3(
    path: str | Path,
    target_config: PreTrainedConfig,
    *,
    spelling: Literal["authors", "speculators"] = "authors",
    draft_vocab_size: int | None = None,
    aux_layers: Sequence[int] | None = None,
    norm_before_residual: bool | None = None,
    norm_before_fc: bool = False,
    fc_norm: bool = False,
    norm_output: bool = False,
    own_embedding: bool = True,
    in_eagle_config: bool = False,
    favoured_token_ids: Sequence[int] = (),
    num_speculative_tokens: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **layer: Any,
) -> Path:
    """Write config.json and model.safetensors of an EAGLE-3 head for a target of `target_config`; returns `path`.

    In the spelling of its "authors", settings stand beside those of the layer and its weights are `midlayer.*`; in that
    of "speculators", the layer's are in `transformer_layer_config` and its weights are `layers.0.*`. None leaves a
    setting out, so that the format's default holds: taps at layers (2, n // 2, n - 3) of a target of n; no norm before
    the residual for the authors, one for speculators; a draft vocabulary that is the target's, without `d2t` and `t2d`.
    `in_eagle_config` puts what the authors' spelling may have in `eagle_config` there, where alone vLLM 0.32 looks for
    taps of another number than three. The rows of the output layer of
    `favoured_token_ids` are larger by FAVOURED_GAIN, and a smaller draft vocabulary has these tokens. `layer` are
    entries of the layer's configuration in place of the target's: `hidden_size` (only beside an embedding of its own),
    `num_attention_heads`, `rope_theta`, ...

    With the same seed both spellings have the same weights.

    Raises:
        ValueError: naming the argument, its value and what is allowed.
    """
    vocab_size = target_config.vocab_size
    num_drafted = vocab_size if draft_vocab_size is None else draft_vocab_size
    if spelling not in ("authors", "speculators"):
        raise ValueError(f"spelling={spelling!r} is unknown; allowed: authors, speculators")
    if not 1 <= num_drafted <= vocab_size:
        raise ValueError(f"draft_vocab_size={draft_vocab_size!r} must be an int from 1 to {vocab_size}")
    if in_eagle_config and spelling != "authors":
        raise ValueError(f"in_eagle_config={in_eagle_config!r} is for spelling='authors' alone, got {spelling!r}")
    if len(favoured_token_ids) > num_drafted:
        raise ValueError(f"favoured_token_ids={favoured_token_ids!r} must be at most {num_drafted}")
    config = _layer_config(target_config, dtype) | layer
    if config["hidden_size"] != target_config.hidden_size and not own_embedding:
        raise ValueError(f"own_embedding={own_embedding!r} must be True beside hidden_size={config['hidden_size']}")
    generator = torch.Generator().manual_seed(seed)
    num_taps = 3 if aux_layers is None else len(aux_layers)
    prefix = "midlayer" if spelling == "authors" else "layers.0"
    weights = _eagle3_weights(config, target_config.hidden_size, num_taps, num_drafted, prefix, generator)
    optional = {"embed_tokens.weight": own_embedding, "input_norm.weight": norm_before_fc}
    optional |= {f"fc_norm.{i}.weight": fc_norm for i in range(num_taps)}
    weights = {name: tensor for name, tensor in weights.items() if optional.get(name, True)}
    token_ids = _draft_vocabulary(vocab_size, num_drafted, favoured_token_ids, generator)
    weights["lm_head.weight"][torch.isin(token_ids, torch.tensor(list(favoured_token_ids)).long())] *= FAVOURED_GAIN
    if num_drafted < vocab_size:
        weights["d2t"] = token_ids - torch.arange(num_drafted)
        weights["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, token_ids, True)
    settings: dict[str, Any] = {
        "draft_vocab_size": draft_vocab_size,
        "target_hidden_size": None if config["hidden_size"] == target_config.hidden_size else target_config.hidden_size,
        "eagle_aux_hidden_state_layer_ids": None if aux_layers is None else list(aux_layers),
        "norm_before_residual": norm_before_residual,
        "norm_before_fc": norm_before_fc or None,
        "fc_norm": fc_norm or None,
        "norm_output": norm_output or None,
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    if spelling == "authors":
        inner = ("eagle_aux_hidden_state_layer_ids", "norm_before_fc") if in_eagle_config else ()
        nested = {name: settings.pop(name) for name in inner if name in settings}
        written = {"architectures": ["LlamaForCausalLMEagle3"]} | config | settings
        if in_eagle_config:
            written["eagle_config"] = nested
    else:
        written = _speculators_config(config, settings, num_speculative_tokens, target_config)
    _save(path, written, weights, dtype)
    return Path(path)


def _speculators_config(
    layer: dict[str, Any], settings: dict[str, Any], num_speculative_tokens: int, target_config: PreTrainedConfig
) -> dict[str, Any]:
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_speculative_tokens}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": layer["vocab_size"],
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": None, "architectures": target_config.architectures},
        },
        "transformer_layer_config": layer,
    } | settings


def _layer_config(target_config: PreTrainedConfig, dtype: torch.dtype) -> dict[str, Any]:
    """A Llama of one layer, as wide as the target."""
    return {
        "model_type": "llama",
        "vocab_size": target_config.vocab_size,
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    } | _widths(target_config)


def _widths(target_config: PreTrainedConfig) -> dict[str, Any]:
    head_dim = getattr(target_config, "head_dim", None)
    rope_parameters = getattr(target_config, "rope_parameters", None) or {}
    return {
        "hidden_size": target_config.hidden_size,
        "intermediate_size": target_config.intermediate_size,
        "num_attention_heads": target_config.num_attention_heads,
        "num_key_value_heads": target_config.num_key_value_heads,
        "head_dim": head_dim or target_config.hidden_size // target_config.num_attention_heads,
        "hidden_act": "silu",
        "rms_norm_eps": target_config.rms_norm_eps,
        "rope_theta": rope_parameters.get("rope_theta", 10000.0),
        "max_position_embeddings": target_config.max_position_embeddings,
    }


def _eagle3_weights(
    config: dict[str, Any], target_width: int, num_taps: int, num_drafted: int, prefix: str, generator: torch.Generator
) -> dict[str, Tensor]:
    """All that a head may have: what a setting leaves out is drawn, too, so that a seed's other weights stay."""
    width = config["hidden_size"]
    weights = {"fc.weight": _matrix(width, num_taps * target_width, FC_GAIN, generator)}
    weights |= {f"{prefix}.hidden_norm.weight": _norm(width, generator)}
    weights |= _llama_layer(prefix, config, 2 * width, generator)
    weights["norm.weight"] = _norm(width, generator)
    weights["lm_head.weight"] = _matrix(num_drafted, width, LOGITS_GAIN, generator)
    weights["embed_tokens.weight"] = torch.randn(config["vocab_size"], width, generator=generator)
    weights["input_norm.weight"] = _norm(num_taps * target_width, generator)
    return weights | {f"fc_norm.{i}.weight": _norm(target_width, generator) for i in range(num_taps)}


def _draft_vocabulary(vocab_size: int, num_drafted: int, favoured: Sequence[int], generator: torch.Generator) -> Tensor:
    """[num_drafted] int64, ascending: target ids of the draft's tokens, the favoured ones among them."""
    order = torch.rand(vocab_size, generator=generator)
    order[list(favoured)] = -1
    return order.argsort()[:num_drafted].sort().values


def write_clover(
    path: str | Path,
    target_config: PreTrainedConfig,
    *,
    num_heads: int = 5,
    num_hidden_layers: int = 2,
    own_embedding: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **layer: Any,
) -> Path:
    """Write config.json and model.safetensors of a Clover-2 head for a target of `target_config`; returns `path`.

    The output layer is the target's, and in no file here; so is the embedding, unless they have one of their own, as
    Clover-2's code does where it is a copy of the output layer. `layer` are entries of config.json in place of the
    target's.

    Raises:
        ValueError: naming the argument, its value and what is allowed.
    """
    for name, value in (("num_heads", num_heads), ("num_hidden_layers", num_hidden_layers)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} must be an int >= 1")
    config = {
        "architectures": ["CloverForCausalLM"],
        "model_type": "clover",
        "num_heads": num_heads,
        "num_hidden_layers": num_hidden_layers,
        "vocab_size": target_config.vocab_size,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    config |= _widths(target_config) | layer
    width = config["hidden_size"]
    if width != target_config.hidden_size:
        raise ValueError(f"hidden_size={width!r} must be the target's, {target_config.hidden_size}")
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for rnn in ("clover_head_mlp_rnn", "clover_head_mlp_rnn2"):
        weights[f"{rnn}.input_layernorm.weight"] = _norm(width, generator)
        for name, gain in (("q", 1.0), ("k", 1.0), ("v", VALUE_GAIN)):
            weights |= _linear(f"{rnn}.{name}", width, width, gain, generator)
    for i in range(num_hidden_layers):
        weights |= _llama_layer(f"layers.{i}", config, width, generator)
    for name in ("clover_norm", "clover_head_norm"):
        weights[f"{name}.weight"] = _norm(width, generator)
    weights |= _linear("clover_head_mlp", width, width, 1.0, generator)
    weights |= _linear("clover_head_mlp2", width, 2 * width, 1.0, generator)
    if own_embedding:
        weights["clover_embed_tokens.weight"] = torch.randn(config["vocab_size"], width, generator=generator)
    _save(path, config, weights, dtype)
    return Path(path)


def _llama_layer(
    prefix: str, config: dict[str, Any], input_width: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Both norms, attention from rows of `input_width` on, and the MLP."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    shapes = {
        "self_attn.q_proj": (heads, input_width, ATTENTION_GAIN),
        "self_attn.k_proj": (kv_heads, input_width, ATTENTION_GAIN),
        "self_attn.v_proj": (kv_heads, input_width, 1.0),
        "self_attn.o_proj": (width, heads, ADDED_GAIN),
        "mlp.gate_proj": (inner, width, 1.0),
        "mlp.up_proj": (inner, width, 1.0),
        "mlp.down_proj": (width, inner, ADDED_GAIN),
    }
    weights = {f"{prefix}.{name}.weight": _matrix(*shape, generator) for name, shape in shapes.items()}
    norms = ("input_layernorm", "post_attention_layernorm")
    return weights | {f"{prefix}.{name}.weight": _norm(width, generator) for name in norms}


def _linear(name: str, out_width: int, in_width: int, gain: float, generator: torch.Generator) -> dict[str, Tensor]:
    bias = torch.randn(out_width, generator=generator) * 0.1
    return {f"{name}.weight": _matrix(out_width, in_width, gain, generator), f"{name}.bias": bias}


def _matrix(out_width: int, in_width: int, gain: float, generator: torch.Generator) -> Tensor:
    """Turns rows whose elements are near 1 into rows whose elements are near `gain`."""
    return torch.randn(out_width, in_width, generator=generator) * (gain / math.sqrt(in_width))


def _norm(width: int, generator: torch.Generator) -> Tensor:
    """From 0.5 to 1.5: a norm that is left out, or taken for another, changes what comes out."""
    return torch.rand(width, generator=generator) + 0.5


def _save(path: str | Path, config: dict[str, Any], weights: dict[str, Tensor], dtype: torch.dtype) -> None:
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    stored = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, path / "model.safetensors")
