"""Which model families can run here: by their config, and by what really reaches the attention hook."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

LAYER_TYPES = ("full_attention", "sliding_attention")
# What a packed pass hands to a model's forward; a model that takes them as unknown keywords ignores them.
FORWARD_ARGUMENTS = ("position_ids", "logits_to_keep")


def check_config(config: PreTrainedConfig, model: str) -> None:
    """Raises ValueError, by name, for architectures that cannot work."""
    text = config.get_text_config()
    name = (getattr(config, "architectures", None) or [config.model_type])[0]

    def refuse(why: str) -> None:
        raise ValueError(f"model {model!r} ({name}) is not supported: {why}")

    if getattr(config, "is_encoder_decoder", False):
        refuse("it is an encoder-decoder; supported are decoder-only models")
    if getattr(text, "kv_lora_rank", None):
        refuse("it has multi-head latent attention (kv_lora_rank), whose KV has no per-head pages")
    others = sorted({str(kind) for kind in getattr(text, "layer_types", None) or []} - set(LAYER_TYPES))
    if others:
        refuse(f"it has layers of type {', '.join(others)}; supported are {' and '.join(LAYER_TYPES)}")
    if getattr(text, "num_kv_shared_layers", 0):
        refuse("its layers share KV (num_kv_shared_layers)")
    if getattr(config, "quantization_config", None):
        refuse("its weights are quantized (quantization_config)")
    if getattr(text, "use_bidirectional_attention", False):
        refuse("its attention is bidirectional")


@dataclass(frozen=True)
class LayerGeometry:
    """What a layer hands to attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class _Recorder:
    """Stands in for a PagedPass and notes what each layer hands to it."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = []
        self.windows: list[int | None] = []

    def attend(
        self,
        layer_idx: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        window: int | None = None,
        *_: object,
    ) -> Tensor:
        self.calls.append((layer_idx, tuple(query.shape), tuple(key.shape), tuple(value.shape)))
        self.windows.append(window)
        return query.new_zeros(*query.shape[:2], value.shape[2])


def _config_window(config: PreTrainedConfig, layer_idx: int) -> int | None:
    """The sliding window that transformers' masks give to the layer."""
    kinds = getattr(config, "layer_types", None)
    if kinds and kinds[layer_idx] != "sliding_attention":
        return None
    # transformers' configs turn use_sliding_window and max_window_layers into layer_types; without those, one window
    # is every layer's.
    if not kinds and not getattr(config, "use_sliding_window", True):
        return None
    return getattr(config, "sliding_window", None)


def check_windows(windows: list[int | None], config: PreTrainedConfig, max_model_len: int) -> None:
    """Raises ValueError where a layer hands another window to the hook than its config says.

    Some models have windows in their masks alone, which the hook never sees.
    """
    for layer_idx, window in enumerate(windows):
        expected = _config_window(config, layer_idx)
        # A window that no sequence outgrows is none.
        if (window or max_model_len) >= max_model_len and (expected or max_model_len) >= max_model_len:
            continue
        if window != expected:
            raise ValueError(
                f"layer {layer_idx} hands sliding_window={window} to its attention, and the config says {expected} "
                "(sliding_window, layer_types)"
            )


@torch.inference_mode()
def find_layers(module: nn.Module, model: str, max_model_len: int) -> list[LayerGeometry]:
    """Runs two tokens and returns what reaches the hook.

    Raises ValueError, by name, where a layer's attention does not go through the hook exactly once and in order, or
    with another window than the config's.
    """
    name = type(module).__name__
    missing = [
        argument for argument in FORWARD_ARGUMENTS if argument not in inspect.signature(module.forward).parameters
    ]
    if missing:
        raise ValueError(
            f"model {model!r} ({name}) is not supported: its forward has no argument {' and no '.join(missing)}"
        )
    recorder = _Recorder()
    num_layers = module.config.get_text_config().num_hidden_layers
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=module.device)
    try:
        module(input_ids=tokens, position_ids=tokens, use_cache=False, logits_to_keep=1, paged_pass=recorder)
    except Exception as error:
        raise ValueError(
            f"model {model!r} ({name}) is not supported: it cannot run packed through the attention hook "
            f"({type(error).__name__}: {error})"
        ) from error
    indices = [call[0] for call in recorder.calls]
    if indices != list(range(num_layers)):
        raise ValueError(
            f"model {model!r} ({name}) is not supported: each of its {num_layers} layers must hand its attention to "
            f"the hook once and in order, and layers {indices} did"
        )
    layers = []
    for layer_idx, query, key, value in recorder.calls:
        if key != value or query[2] != key[2] or query[1] % key[1] or query[0] != 2 or key[0] != 2:
            raise ValueError(
                f"model {model!r} ({name}) is not supported: layer {layer_idx} has query {query}, key {key} and value "
                f"{value}, and needs [tokens, heads, head_dim] with one head_dim"
            )
        layers.append(LayerGeometry(query[1], key[1], key[2]))
    try:
        check_windows(recorder.windows, module.config.get_text_config(), max_model_len)
    except ValueError as error:
        raise ValueError(f"model {model!r} ({name}) is not supported: {error}") from None
    return layers


def find_decoder_layers(module: nn.Module) -> nn.ModuleList:
    """The decoder layers of a transformers model: the list whose entry i holds the attention of layer i.

    Raises ValueError where there is no such list.
    """
    num_layers = module.config.get_text_config().num_hidden_layers
    for layers in module.modules():
        if isinstance(layers, nn.ModuleList) and len(layers) == num_layers:
            held = [{getattr(part, "layer_idx", None) for part in layer.modules()} - {None} for layer in layers]
            if held == [{layer_idx} for layer_idx in range(num_layers)]:
                return layers
    raise ValueError(
        f"hidden states are asked of {type(module).__name__}, which has no list of its {num_layers} layers; "
        "supported are drafters that need none"
    )
