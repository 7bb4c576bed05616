"""From the files of heads to a decoder over pairs of a token and its features."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn
from typing_extensions import override

from specpaged.modeling.flat.config import rotary_frequencies
from specpaged.modeling.flat.cpp_decoder import CppDecoder
from specpaged.modeling.flat.decoder import FlatDecoder
from specpaged.modeling.flat.row_wise import RowWiseOps
from specpaged.modeling.flat.source import FlatSource, MakeLinear
from specpaged.modeling.flat.weights import Checkpoint, layer_shapes
from specpaged.modeling.heads.clover import CloverDecoder, ResAttention, TritonResAttention
from specpaged.modeling.heads.config import HeadsConfig
from specpaged.modeling.heads.cpp_heads import CppHeads, are_all_cpp
from specpaged.modeling.heads.eagle3 import Eagle3Decoder
from specpaged.modeling.loaded_model import LoadedModel

EMBEDDING = {"eagle3": "embed_tokens.weight", "clover": "clover_embed_tokens.weight"}  # which need not be there
_MAPPINGS = ("d2t", "t2d")
_NORM_BEFORE_FC = "input_norm.weight"
_REGRESSIVE, _RECURRENT = "clover_head_mlp_rnn", "clover_head_mlp_rnn2"


class HeadsSource(FlatSource):
    """A checkpoint of heads, beside their target.

    Raises:
        ValueError: what it holds is not what its configuration asks for.
    """

    implementation = "heads"

    def __init__(self, config: HeadsConfig, checkpoint: Checkpoint, target: LoadedModel):
        frequencies = rotary_frequencies(config.hf_config, target.max_model_len)
        super().__init__(config.flat, checkpoint, frequencies, target.max_model_len, target.dtype, target.device)
        self.heads = config
        self.target = target
        self.shapes = _expected_shapes(config, checkpoint.shapes, target.hidden_size)
        self._check()
        self.num_parameters = sum(
            math.prod(shape) for name, shape in checkpoint.shapes.items() if name not in _MAPPINGS
        )

    def _check(self) -> None:
        found, dtypes = self.checkpoint.shapes, self.checkpoint.dtypes
        for name, shape in self.shapes.items():
            if name not in found:
                raise ValueError(f"the checkpoint lacks {name}")
            if found[name] != shape:
                raise ValueError(f"the checkpoint has {name} in the shape {found[name]}; allowed: {shape}")
            if isinstance(dtypes[name], str) and name not in _MAPPINGS:
                raise ValueError(f"the checkpoint has no floating-point type in {name}")
        for name in found:
            if name not in self.shapes:
                raise ValueError(f"the checkpoint holds {name}, which is not supported")

    @override
    def _decoder(self, make_linear: MakeLinear, ops: RowWiseOps) -> nn.Module:
        names = [name for name in self.shapes if name not in _MAPPINGS]
        tensors = self._read(*names)
        linear = partial(_linear, make_linear, tensors)
        make = self._eagle3 if self.heads.method == "eagle3" else self._clover
        decoder = make(tensors, linear, make_linear, ops).eval().requires_grad_(False)
        return CppHeads(decoder, self.target.hidden_size) if are_all_cpp(decoder) else decoder

    def _eagle3(
        self, tensors: dict[str, Tensor], linear: MakeLinear, make_linear: MakeLinear, ops: RowWiseOps
    ) -> nn.Module:
        config = self.heads
        own = EMBEDDING["eagle3"]
        prefix = _layer_name(self.checkpoint.shapes, 0)
        return Eagle3Decoder(
            config,
            tensors[own] if own in tensors else flat_decoder(self.target).embedding,
            linear("fc"),
            ops.norm(tensors[_NORM_BEFORE_FC]) if config.norm_before_fc else None,
            [ops.norm(tensors[name]) for name in _fc_norm_names(config)],
            ops.norm(tensors[f"{prefix}input_layernorm.weight"]),
            ops.norm(tensors[f"{prefix}hidden_norm.weight"]),
            self._layer(0, make_linear, ops),
            ops.norm(tensors["norm.weight"]),
            linear("lm_head"),
            self._rotations(),
            self._target_ids(),
            self.dtype,
        )

    def _clover(
        self, tensors: dict[str, Tensor], linear: MakeLinear, make_linear: MakeLinear, ops: RowWiseOps
    ) -> nn.Module:
        attention = TritonResAttention if ops.backend == "triton" else ResAttention

        def res_attention(name: str) -> ResAttention:
            norm = ops.norm(tensors[f"{name}.input_layernorm.weight"])
            eps, num_heads = self.config.norm_eps, self.config.num_heads
            return attention(norm, linear(f"{name}.q"), linear(f"{name}.k", f"{name}.v"), num_heads, eps)

        return CloverDecoder(
            self.heads,
            flat_decoder(self.target),
            tensors.get(EMBEDDING["clover"]),
            res_attention(_REGRESSIVE),
            res_attention(_RECURRENT),
            [self._layer(layer_idx, make_linear, ops) for layer_idx in range(len(self.config.layers))],
            ops.norm(tensors["clover_norm.weight"]),
            linear("clover_head_mlp"),
            linear("clover_head_mlp2"),
            ops.norm(tensors["clover_head_norm.weight"]),
            self._rotations(),
            self.dtype,
        )

    @override
    def _tensors_of_layer(self, layer_idx: int) -> dict[str, Tensor]:
        prefix = _layer_name(self.checkpoint.shapes, layer_idx)
        names = [name for name in self.shapes if name.startswith(prefix)]
        return {name.removeprefix(prefix): tensor for name, tensor in self._read(*names).items()}

    def _target_ids(self) -> Tensor | None:
        """[the draft's vocabulary] int64, ascending; None where it is the target's."""
        if "d2t" not in self.shapes:
            return None
        offsets = self.checkpoint.read(["d2t"])["d2t"].to(torch.int64)
        target_ids = offsets + torch.arange(len(offsets))
        if len(target_ids) > 1 and not bool((target_ids.diff() > 0).all()):
            raise ValueError("the checkpoint's d2t does not name target ids in ascending order")
        if int(target_ids[0]) < 0 or int(target_ids[-1]) >= self.target.vocab_size:
            raise ValueError(f"the checkpoint's d2t names ids outside of the target's {self.target.vocab_size}")
        return target_ids.to(self.device)


def flat_decoder(model: LoadedModel) -> FlatDecoder:
    """The flat decoder of a model that has one, in whatever kernels."""
    decoder = model.decoder
    return decoder.decoder if isinstance(decoder, CppDecoder) else decoder


def _linear(make_linear: MakeLinear, tensors: dict[str, Tensor], *names: str) -> nn.Module:
    """The layers of these names as one."""
    weight = torch.cat([tensors[f"{name}.weight"] for name in names])
    bias = None
    if f"{names[0]}.bias" in tensors:
        bias = torch.cat([tensors[f"{name}.bias"] for name in names])
    return make_linear(weight, bias)


def _layer_name(found: Mapping[str, tuple[int, ...]], layer_idx: int) -> str:
    """What the names of a layer's tensors begin with: EAGLE's authors have another one than everybody else."""
    midlayer = any(name.startswith("midlayer.") for name in found)
    return "midlayer." if midlayer else f"layers.{layer_idx}."


def _fc_norm_names(config: HeadsConfig) -> list[str]:
    return [f"fc_norm.{i}.weight" for i in range(len(config.hidden_states.layer_inputs))] if config.fc_norm else []


def _expected_shapes(
    config: HeadsConfig, found: Mapping[str, tuple[int, ...]], target_hidden_size: int
) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the tensors that a checkpoint has."""
    flat, hidden = config.flat, config.flat.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    for layer_idx in range(len(flat.layers)):
        for name, shape in layer_shapes(flat, layer_idx).items():
            shapes[name.replace(f"model.layers.{layer_idx}.", _layer_name(found, layer_idx))] = shape
    own = EMBEDDING[config.method]
    if own in found or hidden != target_hidden_size:
        shapes[own] = (config.hf_config.vocab_size, hidden)
    if config.method == "clover":
        for name in (_REGRESSIVE, _RECURRENT):
            shapes[f"{name}.input_layernorm.weight"] = (hidden,)
            for part in "qkv":
                shapes |= {f"{name}.{part}.weight": (hidden, hidden), f"{name}.{part}.bias": (hidden,)}
        for name in ("clover_norm.weight", "clover_head_norm.weight", "clover_head_mlp.bias", "clover_head_mlp2.bias"):
            shapes[name] = (hidden,)
        return shapes | {"clover_head_mlp.weight": (hidden, hidden), "clover_head_mlp2.weight": (hidden, 2 * hidden)}
    prefix = _layer_name(found, 0)
    for part, rows in (("q", flat.num_heads), ("k", flat.num_kv_heads), ("v", flat.num_kv_heads)):
        shapes[f"{prefix}self_attn.{part}_proj.weight"] = (rows * flat.head_dim, 2 * hidden)
    num_read = len(config.hidden_states.layer_inputs)
    shapes |= {f"{prefix}hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    shapes |= {"fc.weight": (hidden, num_read * target_hidden_size), "lm_head.weight": (flat.vocab_size, hidden)}
    shapes |= {name: (target_hidden_size,) for name in _fc_norm_names(config)}
    if config.norm_before_fc:
        shapes[_NORM_BEFORE_FC] = (num_read * target_hidden_size,)
    if flat.vocab_size != config.hf_config.vocab_size or "d2t" in found:
        shapes["d2t"] = (flat.vocab_size,)
    if "t2d" in found:
        shapes["t2d"] = (config.hf_config.vocab_size,)
    return shapes
