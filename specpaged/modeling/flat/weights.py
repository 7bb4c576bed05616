"""A checkpoint's tensors, straight from its safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor

from specpaged.modeling.flat.config import FlatConfig

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
IGNORED = "rotary_emb.inv_freq"  # old checkpoints hold it, and it follows from the config
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

EMBEDDING, FINAL_NORM, OUTPUT = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class Checkpoint:
    """Tensors by name, in one file or sharded over several.

    What is read is a view of a memory-mapped file, which is closed once nothing refers to it: who copies what it reads
    holds one copy.
    """

    def __init__(self, model: str):
        directory = Path(model)
        if not directory.is_dir():
            directory = Path(snapshot_download(model, allow_patterns=[WEIGHTS, INDEX, "model-*.safetensors"]))
        index = directory / INDEX
        names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else [WEIGHTS]
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype | str] = {}  # a str where torch has no such floating-point type
        self._files: dict[str, Path] = {}
        for name in names:
            with safe_open(directory / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (a safe_open is no mapping)
                    piece = file.get_slice(key)
                    self.shapes[key] = tuple(piece.get_shape())
                    self.dtypes[key] = DTYPES.get(piece.get_dtype(), piece.get_dtype())
                    self._files[key] = directory / name

    @property
    def dtype(self) -> torch.dtype:
        """The embedding's dtype, which stands for the checkpoint's."""
        return self.dtypes[EMBEDDING]

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The tensors that have these names, by name."""
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self._files[name], []).append(name)
        tensors = {}
        for path, keys in by_file.items():
            with safe_open(path, framework="pt") as file:
                tensors |= {key: file.get_tensor(key) for key in keys}
        return tensors


def layer_shapes(config: FlatConfig, layer_idx: int) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the tensors that a checkpoint has for a layer."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    if config.fused_qkv:
        qkv = {"qkv_proj": q_size + 2 * kv_size}
    else:
        qkv = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
    gate_up = {"gate_up_proj": 2 * inner} if config.fused_gate_up else {"gate_proj": inner, "up_proj": inner}
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(path: str, rows: int, columns: int, bias: bool) -> None:
        shapes[f"{path}.weight"] = (rows, columns)
        if bias:
            shapes[f"{path}.bias"] = (rows,)

    for name, rows in qkv.items():
        linear(f"self_attn.{name}", rows, hidden, config.qkv_bias)
    linear("self_attn.o_proj", hidden, q_size, config.o_bias)
    for name, rows in gate_up.items():
        linear(f"mlp.{name}", rows, hidden, config.mlp_bias)
    linear("mlp.down_proj", hidden, inner, config.mlp_bias)
    if config.qk_norm:
        shapes |= {f"self_attn.{name}.weight": (config.head_dim,) for name in ("q_norm", "k_norm")}
    norms = config.norms
    for name in (norms.before_attention, norms.after_attention, norms.before_mlp, norms.after_mlp):
        if name is not None:
            shapes[f"{name}.weight"] = (hidden,)
    return {f"model.layers.{layer_idx}.{name}": shape for name, shape in shapes.items()}


def expected_shapes(config: FlatConfig) -> dict[str, tuple[int, ...]]:
    """The names and shapes of all tensors that a checkpoint of this configuration has."""
    shapes = {EMBEDDING: (config.vocab_size, config.hidden_size), FINAL_NORM: (config.hidden_size,)}
    if not config.tied:
        shapes[OUTPUT] = (config.vocab_size, config.hidden_size)
    for layer_idx in range(len(config.layers)):
        shapes |= layer_shapes(config, layer_idx)
    return shapes


def why_not(config: FlatConfig, checkpoint: Checkpoint) -> str | None:
    """Why the flat decoder does not take these tensors; None if it does."""
    expected = expected_shapes(config)
    for problem, names in (
        ("lacks", (name for name in expected if name not in checkpoint.shapes)),
        ("also holds", (name for name in checkpoint.shapes if name not in expected and IGNORED not in name)),
        (
            "has in another shape",
            (name for name, shape in expected.items() if checkpoint.shapes.get(name, shape) != shape),
        ),
        ("has no floating-point type in", (n for n, dtype in checkpoint.dtypes.items() if isinstance(dtype, str))),
    ):
        name = next(iter(names), None)
        if name is not None:
            return f"the checkpoint {problem} {name}"
    return None
