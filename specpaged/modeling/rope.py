"""RoPE that does not depend on who else is in the batch."""

from __future__ import annotations

from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

FOLLOWS_LONGEST = ("dynamic", "longrope")


def freeze_rope(module: nn.Module, max_model_len: int) -> list[str]:
    """Fixes the frequencies of RoPE types that transformers recomputes from the longest position of a pass, as if every
    sequence were max_model_len long. Returns the types that were fixed."""
    frozen = []
    for rotary in module.modules():
        rope_type = getattr(rotary, "rope_type", None)
        if isinstance(rope_type, str):
            types = {None: rope_type}
        elif isinstance(rope_type, dict):
            types = dict(rope_type)
        else:
            continue
        for layer_type, kind in types.items():
            if not any(word in kind for word in FOLLOWS_LONGEST):
                continue
            _freeze(rotary, layer_type, kind, max_model_len)
            frozen.append(kind)
    return frozen


def _freeze(rotary: nn.Module, layer_type: str | None, kind: str, max_model_len: int) -> None:
    prefix = "" if layer_type is None else f"{layer_type}_"
    parameters = rotary.config.rope_parameters
    parameters = parameters if layer_type is None else parameters[layer_type]
    if kind == "longrope":
        edge = parameters.get("original_max_position_embeddings") or rotary.config.max_position_embeddings
        seq_len = edge + 1
    else:
        edge = rotary.original_max_seq_len
        seq_len = max_model_len
    if max_model_len > edge:
        arguments = {} if layer_type is None else {"layer_type": layer_type}
        buffer = getattr(rotary, f"{prefix}inv_freq")
        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](rotary.config, buffer.device, seq_len=seq_len, **arguments)
        rotary.register_buffer(f"{prefix}inv_freq", frequencies, persistent=False)
        setattr(rotary, f"{prefix}attention_scaling", scaling)
    # transformers' update looks at the type alone.
    if layer_type is None:
        rotary.rope_type = "default"
    else:
        rotary.rope_type = {**rotary.rope_type, layer_type: "default"}
