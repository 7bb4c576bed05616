"""The parts of a Llama layer over whole sequences, differentiable: what both kinds of heads are built of.

Dimensions: B sequences of T tokens, d hidden size, Hq / Hkv heads of D.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specpaged.training.heads.step_attention import step_attention
from specpaged.training.heads.target import FrozenTarget


@dataclass(frozen=True)
class HeadShape:
    """The sizes of heads, in the words of their config.json."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int
    max_position_embeddings: int

    @classmethod
    def of(cls, target: FrozenTarget) -> HeadShape:
        """A layer's worth of the target."""
        config, hf_config = target.config, target.loaded.hf_config
        return cls(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.norm_eps,
            rope_theta=_rope_theta(getattr(hf_config, "rope_parameters", None)),
            vocab_size=config.vocab_size,
            max_position_embeddings=hf_config.max_position_embeddings,
        )

    def as_config(self) -> dict[str, Any]:
        """Keys of a config.json."""
        return vars(self) | {
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> HeadShape:
        """The sizes that a config.json names."""
        return cls(**{name: config[name] for name in cls.__dataclass_fields__})


def _rope_theta(parameters: Any) -> float:
    """The base of RoPE, of the first kind of layers where these differ."""
    if isinstance(parameters, dict):
        if "rope_theta" in parameters:
            return float(parameters["rope_theta"])
        for value in parameters.values():
            if isinstance(value, dict):
                return _rope_theta(value)
    return 10_000.0


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d] float32, under autocast, too."""
        return F.rms_norm(x.float(), x.shape[-1:], self.weight, self.eps)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: HeadShape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]"""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """Llama attention of `input_size` inputs, in steps over the same rows.

    In step 0, row i is position i, and reads positions 0 .. i: plain causal attention. In step j, row i is position
    i + j of a sequence of its own, which went on from position i by drafts alone: it reads positions 0 .. i of step 0,
    and what row i itself was in steps 1 .. j.
    """

    def __init__(self, shape: HeadShape, input_size: int):
        super().__init__()
        self.shape = shape
        q_size, kv_size = (n * shape.head_dim for n in (shape.num_attention_heads, shape.num_key_value_heads))
        self.q_proj = nn.Linear(input_size, q_size, bias=False)
        self.k_proj = nn.Linear(input_size, kv_size, bias=False)
        self.v_proj = nn.Linear(input_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, steps: list[tuple[Tensor, Tensor]], first_row: int = 0) -> Tensor:
        """[B, T, input_size] -> [B, T - first_row, d] in step 0, [B, R, input_size] -> [B, R, d] in a later one.

        `steps` are keys and values [B, Hq, rows, D] of earlier steps, and grow by one. Rows before `first_row` are
        read in step 0, and asked for nothing: later steps have R = T - first_row rows.
        """
        start = first_row + len(steps) if steps else 0
        cos, sin = rotations(x.shape[1], start, self.shape, x.device)
        key = rotated(self._heads(self.k_proj(x)), cos, sin)
        value = self._heads(self.v_proj(x))
        if not steps:
            x, cos, sin = x[:, first_row:], cos[first_row:], sin[first_row:]
        query = rotated(self._heads(self.q_proj(x)), cos, sin)
        group = query.shape[1] // key.shape[1]
        steps.append((key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)))
        attended = step_attention(query, *zip(*steps, strict=True))
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """[B, T, H * D] -> [B, H, T, D]"""
        return x.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)


def rotations(num_rows: int, start: int, shape: HeadShape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, D] float32 of positions start, start + 1, ..."""
    half = torch.arange(0, shape.head_dim, 2, device=device).float() / shape.head_dim
    angles = torch.arange(start, start + num_rows, device=device)[:, None] * shape.rope_theta**-half
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[B, H, T, D]: pairs (i, i + D / 2) turned by their position's angles."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Layer(nn.Module):
    """A Llama layer: norm, attention, norm, MLP, on a residual stream."""

    def __init__(self, shape: HeadShape):
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape, shape.hidden_size)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, first_row: int = 0) -> Tensor:
        """[B, T, d] -> [B, T - first_row, d], causal."""
        x = x[:, first_row:] + self.self_attn(self.input_layernorm(x), [], first_row)
        return x + self.mlp(self.post_attention_layernorm(x))
