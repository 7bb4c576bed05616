"""From a checkpoint's files to a flat decoder, a layer at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedConfig
from typing_extensions import override

from specpaged.modeling.checkpoint import first_line
from specpaged.modeling.exact import ExactLinears
from specpaged.modeling.families import LayerGeometry
from specpaged.modeling.flat import config as families
from specpaged.modeling.flat import weights
from specpaged.modeling.flat.config import ROPE, FlatConfig, flat_config, rotary_frequencies
from specpaged.modeling.flat.cpp_decoder import CppDecoder, is_all_cpp
from specpaged.modeling.flat.decoder import FlatDecoder, FlatLayer
from specpaged.modeling.flat.row_wise import Rotations, RowWiseOps
from specpaged.modeling.flat.weights import Checkpoint, expected_shapes, layer_shapes
from specpaged.modeling.linear import FastLinear
from specpaged.modeling.shard import GatheredLinear, Shard
from specpaged.modeling.source import Source
from specpaged_kernels.cpu.library import STORAGE

QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")

MakeLinear = Callable[[Tensor, Tensor | None], nn.Module]


class FlatSource(Source):
    """The checkpoint of a flat decoder. `FlatSource.open` says why where there is none.

    Layers are read one by one and kept in the form in which they compute: of a checkpoint nothing else is held than the
    embedding, which stays mapped where its rows can be looked up as they are.
    """

    implementation = "flat"

    def __init__(
        self,
        config: FlatConfig,
        checkpoint: Checkpoint,
        frequencies: dict[str, tuple[Tensor, float]],
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard | None = None,
    ):
        self.config = config if shard is None else shard.of(config)
        self.whole = config  # what the checkpoint holds
        self.shard = shard
        self.checkpoint = checkpoint
        self.frequencies = frequencies
        self.max_model_len = max_model_len
        self.dtype = dtype
        self.device = device
        self.architecture = config.architecture
        self.layers: list[LayerGeometry] = [self.config.geometry] * len(config.layers)
        self.vocab_size = config.vocab_size
        self.num_parameters = sum(math.prod(shape) for shape in expected_shapes(config).values())

    @classmethod
    def open(
        cls,
        model: str,
        config: PreTrainedConfig,
        dtype: torch.dtype | None,
        device: torch.device,
        max_model_len: int,
        trust_remote_code: bool,
        shard: Shard | None = None,
    ) -> FlatSource | str:
        """The source, or why there is none; `dtype` None is the checkpoint's (float32 for float16 on a CPU)."""
        reason = families.why_not(config, trust_remote_code)
        if reason is not None:
            return reason
        try:
            ours, checkpoint = flat_config(config), Checkpoint(model)
        except (OSError, SafetensorError) as error:
            return f"its safetensors cannot be had: {first_line(error)}"
        reason = weights.why_not(ours, checkpoint) or (shard and shard.check(ours))
        if reason:
            return reason
        dtype = dtype or getattr(config, "dtype", None) or checkpoint.dtype
        if dtype not in weights.DTYPES.values():
            return f"its dtype is {dtype}"
        if dtype == torch.float16 and device.type == "cpu":
            dtype = torch.float32
        frequencies = rotary_frequencies(config, max_model_len)
        for inverse, _ in frequencies.values():
            rotated = 2 * len(inverse)
            if rotated > ours.head_dim or (rotated < ours.head_dim and not ours.partial_rope):
                return f"its RoPE turns {rotated} of a head's {ours.head_dim} dimensions"
        return cls(ours, checkpoint, frequencies, max_model_len, dtype, device, shard)

    @override
    def exact(self, linears: ExactLinears) -> tuple[nn.Module, set[int]]:
        ops = RowWiseOps(self.config, linears.backend, splits_activation=linears.num_threads > 2)
        inner_sizes = set()
        if ops.torch_gates:
            inner_sizes.add(self.config.intermediate_size)
        if self.config.final_softcap is not None:
            inner_sizes.add(self.vocab_size)
        if linears.backend == "torch":
            linears.want_rows(2)
        return self._decoder(linears.make, ops), inner_sizes

    @override
    def fast(self, backend: str) -> nn.Module:
        make_linear = partial(FastLinear, backend=backend)
        return self._decoder(make_linear, RowWiseOps(self.config, backend, splits_activation=False))

    def _decoder(self, make_linear: MakeLinear, ops: RowWiseOps) -> nn.Module:
        config = self.config
        layers = [self._layer(layer_idx, make_linear, ops) for layer_idx in range(len(config.layers))]
        ends = self._read(weights.EMBEDDING, weights.FINAL_NORM, *([] if config.tied else [weights.OUTPUT]))
        embedding = ends[weights.EMBEDDING]
        output = make_linear(ends.get(weights.OUTPUT, embedding), None)
        if self.device.type == "cpu" and self.dtype == torch.float32:  # rows become float32 when they are looked up
            embedding = self._stored_embedding()
        final_norm = ops.norm(ends[weights.FINAL_NORM])
        decoder = FlatDecoder(config, embedding, layers, final_norm, output, self._rotations(), self.dtype)
        decoder = decoder.eval().requires_grad_(False)
        return CppDecoder(config, decoder) if self.shard is None and is_all_cpp(decoder.layers, [output]) else decoder

    def _rotations(self) -> Rotations:
        """cos and sin [max_model_len, R / 2] float32 of all positions."""
        positions = torch.arange(self.max_model_len, device=self.device)[:, None].float()
        rotations = {}
        for rope, (inverse, factor) in self.frequencies.items():
            angles = positions * inverse.to(self.device)
            rotations[rope] = (angles.cos() * factor, angles.sin() * factor)
        return rotations

    def _stored_embedding(self) -> Tensor:
        """[V, H], as it lies in the checkpoint if the C++ decoder can read that, else in the model's dtype."""
        embedding = self.checkpoint.read([weights.EMBEDDING])[weights.EMBEDDING]
        return embedding if embedding.dtype in STORAGE else embedding.to(self.dtype)

    def _read(self, *names: str) -> dict[str, Tensor]:
        return {name: tensor.to(self.device, self.dtype) for name, tensor in self.checkpoint.read(names).items()}

    def _tensors_of_layer(self, layer_idx: int) -> dict[str, Tensor]:
        """By their names within the layer."""
        prefix = f"model.layers.{layer_idx}."
        tensors = self._read(*layer_shapes(self.whole, layer_idx))
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}

    def _layer(self, layer_idx: int, make_linear: MakeLinear, ops: RowWiseOps) -> FlatLayer:
        config, tensors = self.config, self._tensors_of_layer(layer_idx)

        def linear(*paths: str) -> nn.Module:
            return make_linear(*(_concatenated(tensors, paths, kind) for kind in ("weight", "bias")))

        if config.interleaved_rope:
            rotated = 2 * len(self.frequencies[ROPE][0])
            for name, num_heads in (("q_proj", self.whole.num_heads), ("k_proj", self.whole.num_kv_heads)):
                for path in (f"self_attn.{name}.weight", f"self_attn.{name}.bias"):
                    if path in tensors:
                        tensors[path] = halves_apart(tensors[path], num_heads, rotated)
        if self.shard is not None:
            self._shard(tensors)
        linears = {
            "qkv": linear(*(f"self_attn.{name}" for name in (["qkv_proj"] if config.fused_qkv else QKV))),
            "o": linear("self_attn.o_proj"),
            "gate_up": linear(*(f"mlp.{name}" for name in (["gate_up_proj"] if config.fused_gate_up else GATE_UP))),
            "down": linear("mlp.down_proj"),
        }
        if self.shard is not None:
            linears |= {name: GatheredLinear(linears[name], self.shard) for name in ("o", "down")}
        norms = {
            role: ops.norm(tensors[f"{name}.weight"]) for role, name in vars(config.norms).items() if name is not None
        }
        head_weight = None
        if config.qk_norm:
            query, key = (tensors[f"self_attn.{name}.weight"].float() for name in ("q_norm", "k_norm"))
            head_weight = torch.cat([query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)])
            head_weight = head_weight + config.norm_offset
        return FlatLayer(config, layer_idx, linears, norms, ops.heads(layer_idx, head_weight), ops.gate())

    def _shard(self, tensors: dict[str, Tensor]) -> None:
        """Replaces every matrix and bias of a layer by this rank's share of its outputs."""
        whole = self.whole
        query, key = whole.num_heads * whole.head_dim, whole.num_kv_heads * whole.head_dim
        fused = {"self_attn.qkv_proj": (query, key, key), "mlp.gate_up_proj": (whole.intermediate_size,) * 2}
        for name, tensor in tensors.items():
            path = name.rpartition(".")[0]
            if path in fused:
                tensors[name] = self.shard.groups(tensor, fused[path])
            elif path.endswith("_proj"):
                tensors[name] = self.shard.rows(tensor)


def _concatenated(tensors: dict[str, Tensor], paths: tuple[str, ...], kind: str) -> Tensor | None:
    parts = [tensors[f"{path}.{kind}"] for path in paths if f"{path}.{kind}" in tensors]
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def halves_apart(projection: Tensor, num_heads: int, rotated: int) -> Tensor:
    """Rows of a query or key projection ([heads * D, H], or its bias) from interleaved RoPE to RoPE by halves.

    Of each head's first `rotated` rows, pairs (0, 1), (2, 3) ... become (i, i + rotated / 2). Query and key being
    ordered alike, their products stay what they are.
    """
    heads = projection.view(num_heads, -1, *projection.shape[1:])
    parts = heads[:, 0:rotated:2], heads[:, 1:rotated:2], heads[:, rotated:]
    return torch.cat(parts, dim=1).view(projection.shape)
