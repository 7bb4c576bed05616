"""What one model takes of a machine's memory: weights, KV of a token, and what a pass needs for a row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specpaged.planning.checkpoint_tensors import ITEM_BYTES, CheckpointTensors, StoredTensor

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_DTYPE_BYTES = DTYPE_BYTES | {"fp8_e4m3": 1}
PANEL = 16  # outputs, in whole numbers of which our kernels keep a matrix
_FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}


@dataclass(frozen=True)
class ModelMemory:
    """Bytes of one model, as the engine's flat decoder holds it."""

    name: str
    architecture: str
    num_parameters: int
    dtype: str  # of the arithmetic
    kv_dtype: str
    max_position_embeddings: int
    vocab_size: int
    weight_bytes: int
    kv_bytes_per_token: int
    row_bytes: int  # of a pass's buffers, for each row
    logits_bytes: int  # for each row whose logits are made
    file_bytes: int  # of the weights as they are stored

    @classmethod
    def of(
        cls,
        checkpoint: CheckpointTensors,
        *,
        device: str = "cpu",
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        max_model_len: int | None = None,
        argument: str = "--model",
    ) -> ModelMemory:
        """By its config and its tensors' shapes.

        Raises:
            ValueError: the config lacks a size that is needed.
        """
        config = _text_config(checkpoint.config)
        sizes = {
            key: _size(config, key, argument)
            for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        }
        hidden, num_heads = sizes["hidden_size"], sizes["num_attention_heads"]
        head_dim = config.get("head_dim") or hidden // num_heads
        num_kv_heads = config.get("num_key_value_heads") or num_heads
        inner = config.get("intermediate_size") or 4 * hidden
        longest = config.get("max_position_embeddings") or 0
        arithmetic = _arithmetic(checkpoint, config, dtype, device)
        item, kv_dtype = DTYPE_BYTES[arithmetic], arithmetic if kv_cache_dtype == "auto" else kv_cache_dtype
        q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
        weights = _weight_bytes(checkpoint, config, arithmetic, device)
        weights += 4 * head_dim * (max_model_len or longest)  # cosines and sines
        if any(tensor.name.endswith("q_norm.weight") for tensor in checkpoint.tensors):
            weights += 4 * (num_heads + num_kv_heads) * head_dim * sizes["num_hidden_layers"]
        # x, its norm and what is added; query, keys and values, and what attention makes of them; the gated MLP;
        # cosines and sines. And the linears' input once more in float32, of the widest one.
        row_bytes = item * (3 * hidden + 2 * q_size + 2 * kv_size + 3 * inner) + 4 * head_dim
        row_bytes += 4 * max(hidden, q_size, inner)
        return cls(
            str(checkpoint.directory),
            _architecture(config, checkpoint.config),
            checkpoint.num_parameters,
            arithmetic,
            kv_dtype,
            longest,
            sizes["vocab_size"],
            weights,
            2 * sizes["num_hidden_layers"] * kv_size * KV_DTYPE_BYTES[kv_dtype],
            row_bytes,
            sizes["vocab_size"] * item,
            sum(tensor.num_bytes for tensor in checkpoint.tensors),
        )


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A multimodal model's own of its text, or what `speculators` keeps of a layer."""
    return config.get("text_config") or config.get("transformer_layer_config") or config


def _architecture(config: Mapping[str, Any], whole: Mapping[str, Any]) -> str:
    """Its name, as start-up reports have it."""
    names = config.get("architectures") or whole.get("architectures") or ["?"]
    return names[0] + (f" ({whole['synthetic']})" if whole.get("synthetic") else "")


def _size(config: Mapping[str, Any], key: str, argument: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{argument}: config.json has {key}={value!r}; allowed: an int >= 1")
    return value


def _arithmetic(checkpoint: CheckpointTensors, config: Mapping[str, Any], dtype: str, device: str) -> str:
    """The dtype of the arithmetic: the checkpoint's, but float32 for float16 on a CPU."""
    named = config.get("dtype") or config.get("torch_dtype") or checkpoint.dtype
    if dtype == "auto":
        dtype = named if named in DTYPE_BYTES else checkpoint.dtype
    return "float32" if dtype == "float16" and not device.startswith("cuda") else dtype


def _weight_bytes(checkpoint: CheckpointTensors, config: Mapping[str, Any], arithmetic: str, device: str) -> int:
    """Of matrices in the kernels' layout, of embedding, norms and biases.

    On a CPU a matrix of 16-bit values stays 16 bits wide where the arithmetic is in float32, and an output layer that
    is tied to the embedding is a copy of it.
    """
    item, on_cpu = DTYPE_BYTES[arithmetic], not device.startswith("cuda")
    total, matrices = 0, defaultdict(list)
    for tensor in checkpoint.tensors:
        if len(tensor.shape) != 2:
            total += tensor.num_elements * (4 if on_cpu else item)
        elif "embed_tokens" in tensor.name:
            total += tensor.num_elements * (_stored(tensor, item) if on_cpu else item)
            if on_cpu and config.get("tie_word_embeddings", checkpoint.config.get("tie_word_embeddings", True)):
                matrices[f"{tensor.name} as output"].append(tensor)
        else:
            prefix, _, last = tensor.name.removesuffix(".weight").rpartition(".")
            matrices[f"{prefix}.{_FUSED.get(last, last)}"].append(tensor)
    for tensors in matrices.values():
        num_rows, width = sum(tensor.shape[0] for tensor in tensors), tensors[0].shape[1]
        stored = _stored(tensors[0], item) if on_cpu else item
        total += -(-num_rows // PANEL) * PANEL * width * stored
    return total


def _stored(tensor: StoredTensor, item: int) -> int:
    """Bytes of an element: those of the checkpoint where these are fewer."""
    return min(item, ITEM_BYTES.get(tensor.dtype, item))
