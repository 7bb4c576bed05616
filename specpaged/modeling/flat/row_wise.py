"""The row-wise operations of a flat layer, in torch and in our kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from typing_extensions import override

from specpaged.modeling.exact import ElementwisePieces
from specpaged.modeling.flat.config import FlatConfig
from specpaged_kernels.cpu import rowwise

CPP_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # transformers' names -> the kernel's

Rotations = dict[str, tuple[Tensor, Tensor]]  # cos and sin [N, R / 2] float32, by LayerConfig.rope


class Norm(nn.Module, ABC):
    """An RMS norm of rows."""

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """x [M, H] -> [M, H]"""

    @abstractmethod
    def add(self, x: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        """x + added * residual_multiplier (x may be overwritten), and that sum normalised; [M, H] each."""


class TorchNorm(Norm):
    """The norm in torch; in float32 where the stored weight lacks an offset (Gemma's), which its dtype would round."""

    def __init__(self, weight: Tensor, config: FlatConfig):
        super().__init__()
        self.weight = weight.float() + config.norm_offset if config.norm_offset else weight.clone()
        self.eps = config.norm_eps
        self.multiplier = config.residual_multiplier
        self._shape = tuple(weight.shape)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.to(self.weight.dtype), self._shape, self.weight, self.eps).to(x.dtype)

    @override
    def add(self, x: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        if added is not None:
            x = x + (added if self.multiplier == 1.0 else added * self.multiplier)
        return x, self(x)


class TritonNorm(Norm):
    """The norm in our Triton kernel."""

    def __init__(self, weight: Tensor, config: FlatConfig):
        super().__init__()
        from specpaged_kernels.rms_norm import rms_norm  # where it is wanted: defining kernels takes a second

        self.weight = weight.clone()  # aligned, which a mapped file's tensors need not be
        self.eps, self.offset, self.multiplier = config.norm_eps, config.norm_offset, config.residual_multiplier
        self._rms_norm = rms_norm

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self._rms_norm(x, self.weight, self.eps, weight_offset=self.offset)

    @override
    def add(self, x: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        if added is None:
            return x, self(x)
        if self.multiplier != 1.0:
            added = added * self.multiplier
        return x, self._rms_norm(added, self.weight, self.eps, residual=x, weight_offset=self.offset)


class CppNorm(Norm):
    """The norm in our C++ kernel."""

    def __init__(self, weight: Tensor, config: FlatConfig):
        super().__init__()
        self.weight = weight.float() + config.norm_offset
        self.eps, self.multiplier = config.norm_eps, config.residual_multiplier

    @override
    def forward(self, x: Tensor) -> Tensor:
        return rowwise.rms_norm(x, self.weight, self.eps)

    @override
    def add(self, x: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        return x, rowwise.rms_norm(x, self.weight, self.eps, added, self.multiplier)


class TorchHeads(nn.Module):
    """Query, key and value of each head: its norm, where the family has one, and RoPE."""

    def __init__(self, config: FlatConfig, rope: str | None, weight: Tensor | None):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.rope, self.eps = rope, config.norm_eps
        self.weight = weight  # [Hq + Hkv, D] float32

    def forward(self, qkv: Tensor, rotations: Rotations) -> tuple[Tensor, Tensor, Tensor]:
        """qkv [N, (Hq + 2 Hkv) * D] (may be overwritten) -> [N, Hq, D], [N, Hkv, D], [N, Hkv, D]"""
        qkv = qkv.view(len(qkv), -1, self.head_dim)
        qk, value = qkv.split([self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=1)
        if self.weight is not None:
            qk = self._norm(qk)
        if self.rope is not None:
            cos, sin = (x.to(qk.dtype)[:, None] for x in rotations[self.rope])
            half = cos.shape[-1]
            first, second, rest = qk[..., :half], qk[..., half : 2 * half], qk[..., 2 * half :]
            qk = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
        query, key = qk.split([self.num_heads, self.num_kv_heads], dim=1)
        return query, key, value

    def _norm(self, x: Tensor) -> Tensor:
        return (F.rms_norm(x.float(), (self.head_dim,), None, self.eps) * self.weight).to(x.dtype)


class TritonHeads(TorchHeads):
    """TorchHeads with its norm in our kernel: torch's on a GPU depends on the rows."""

    def __init__(self, config: FlatConfig, rope: str | None, weight: Tensor | None):
        super().__init__(config, rope, weight)
        if weight is not None:
            from specpaged_kernels.rms_norm import rms_norm

            self._rms_norm = rms_norm
            self.ones = torch.ones_like(weight[0])

    def _norm(self, x: Tensor) -> Tensor:
        rows = x.float().reshape(-1, self.head_dim)
        return (self._rms_norm(rows, self.ones, self.eps).view(x.shape) * self.weight).to(x.dtype)


class CppHeads(TorchHeads):
    """TorchHeads in our C++ kernel: in place, in one pass over the rows."""

    @override
    def forward(self, qkv: Tensor, rotations: Rotations) -> tuple[Tensor, Tensor, Tensor]:
        qkv = qkv.view(len(qkv), -1, self.head_dim)
        cos, sin = (None, None) if self.rope is None else rotations[self.rope]
        rowwise.norm_and_rotate(qkv, self.num_heads + self.num_kv_heads, self.weight, self.eps, cos, sin)
        return qkv.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)


class TorchGate(nn.Module):
    """The gated activation of an MLP."""

    def __init__(self, activation: nn.Module):
        super().__init__()
        self.activation = activation

    def forward(self, gate_up: Tensor) -> Tensor:
        """[M, 2 * I] -> [M, I]"""
        gate, up = gate_up.chunk(2, dim=-1)
        return self.activation(gate) * up


class CppGate(nn.Module):
    """The gated activation of an MLP in our C++ kernel."""

    def __init__(self, activation: str):
        super().__init__()
        self.activation = activation

    def forward(self, gate_up: Tensor) -> Tensor:
        """[M, 2 * I] -> [M, I]"""
        return rowwise.gate(gate_up, self.activation)


class RowWiseOps:
    """Makes the row-wise operations of a decoder for a backend.

    `splits_activation`: torch's activation runs on few elements at a time, so that no kernel splits them over threads.
    """

    def __init__(self, config: FlatConfig, backend: str, splits_activation: bool):
        self.config, self.backend = config, backend
        self._norm, self._heads = {
            "cpp": (CppNorm, CppHeads),
            "triton": (TritonNorm, TritonHeads),
        }.get(backend, (TorchNorm, TorchHeads))
        # Whether torch's element-wise functions see [M, I].
        self.torch_gates = backend != "cpp" or config.activation not in CPP_ACTIVATIONS
        if self.torch_gates:
            activation = ACT2FN[config.activation]
            self._gate: nn.Module = TorchGate(ElementwisePieces(activation) if splits_activation else activation)
        else:
            self._gate = CppGate(CPP_ACTIVATIONS[config.activation])

    def norm(self, weight: Tensor) -> Norm:
        """A norm with the stored weight [H]."""
        return self._norm(weight, self.config)

    def heads(self, layer_idx: int, weight: Tensor | None) -> TorchHeads:
        """What stands between a layer's projection and its attention; weight [Hq + Hkv, D] float32 of its norm."""
        return self._heads(self.config, self.config.layers[layer_idx].rope, weight)

    def gate(self) -> nn.Module:
        """The gated activation, [M, 2 * I] -> [M, I]: one module for all layers."""
        return self._gate
