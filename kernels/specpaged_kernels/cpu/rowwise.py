"""Row-wise operations of a decoder on a CPU: see rowwise.cpp."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from specpaged_kernels.cpu.library import FLOAT, POINTER, SIZE, check_tensor, functions

ACTIVATIONS = ("silu", "gelu_tanh")

_ARGUMENTS = {
    "rms_norm": [POINTER, SIZE, POINTER, FLOAT, POINTER, FLOAT, SIZE, SIZE, POINTER],
    "norm_and_rotate": [POINTER, SIZE, POINTER, FLOAT, POINTER, POINTER, SIZE, SIZE, SIZE, SIZE],
    "silu_gate": [POINTER, SIZE, SIZE, POINTER],
    "gelu_tanh_gate": [POINTER, SIZE, SIZE, POINTER],
}


@functools.cache
def _functions(name: str) -> dict:
    return functions(name, _ARGUMENTS[name])


def rms_norm(
    x: Tensor,  # [M, H] dtype, H contiguous
    weight: Tensor,  # [H] float32
    eps: float,
    added: Tensor | None = None,  # [M, H] dtype, contiguous: x becomes x + added * multiplier, in place, first
    multiplier: float = 1.0,
) -> Tensor:  # [M, H] dtype
    """What `rms_norm_ref` says."""
    num_rows, size = x.shape
    check_tensor("x", x, (num_rows, size), x.dtype, contiguous=False)
    check_tensor("weight", weight, (size,), torch.float32)
    check_tensor("added", added, (num_rows, size), x.dtype)
    if x.stride(1) != 1:
        raise ValueError(f"x has strides {x.stride()}; allowed: H contiguous")
    y = torch.empty(num_rows, size, dtype=x.dtype)
    _functions("rms_norm")[x.dtype](
        x.data_ptr(), x.stride(0), None if added is None else added.data_ptr(), multiplier, weight.data_ptr(), eps,
        num_rows, size, y.data_ptr(),
    )  # fmt: skip
    return y


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float, added: Tensor | None = None, multiplier: float = 1.0) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight in float64, rounded once."""
    if added is not None:
        x += (added.double() * multiplier).to(x.dtype)
    values = x.double()
    return (values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps) * weight.double()).to(x.dtype)


def norm_and_rotate(
    qkv: Tensor,  # [M, heads, D] dtype, D and heads contiguous
    num_heads: int,  # of query and key, the first ones
    weight: Tensor | None,  # [num_heads, D] float32
    eps: float,
    cosine: Tensor | None,  # [M, R / 2] float32
    sine: Tensor | None,
) -> None:
    """What `norm_and_rotate_ref` says, in place."""
    num_rows, heads, head_dim = qkv.shape
    if not 0 <= num_heads <= heads:
        raise ValueError(f"num_heads={num_heads}; allowed: 0 to {heads}, those of qkv")
    check_tensor("qkv", qkv, (num_rows, heads, head_dim), qkv.dtype, contiguous=False)
    if qkv.stride()[1:] != (head_dim, 1):
        raise ValueError(f"qkv has strides {qkv.stride()}; allowed: heads and D contiguous")
    check_tensor("weight", weight, (num_heads, head_dim), torch.float32)
    if (cosine is None) != (sine is None):
        raise ValueError("cosine and sine must both be given, or none of them")
    if cosine is not None:
        check_tensor("cosine", cosine, (num_rows, min(cosine.shape[1], head_dim // 2)), torch.float32)
        check_tensor("sine", sine, cosine.shape, torch.float32)
    _functions("norm_and_rotate")[qkv.dtype](
        qkv.data_ptr(), qkv.stride(0), None if weight is None else weight.data_ptr(), eps,
        None if cosine is None else cosine.data_ptr(), None if sine is None else sine.data_ptr(),
        0 if cosine is None else cosine.shape[1], num_rows, num_heads, head_dim,
    )  # fmt: skip


def norm_and_rotate_ref(
    qkv: Tensor, num_heads: int, weight: Tensor | None, eps: float, cosine: Tensor | None, sine: Tensor | None
) -> None:
    """An RMS norm over each of the first heads, then RoPE: of their first R dimensions, i and i + R/2 turn together."""
    heads = qkv[:, :num_heads]
    x = heads.double()
    if weight is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()
        x = x.to(qkv.dtype).double()
    if cosine is not None:
        half = cosine.shape[1]
        c, s = cosine[:, None].double(), sine[:, None].double()
        first, second = x[..., :half], x[..., half : 2 * half]
        x = torch.cat([first * c - second * s, second * c + first * s, x[..., 2 * half :]], dim=-1)
    heads.copy_(x.to(qkv.dtype))


def gate(
    gate_up: Tensor,  # [M, 2 * I] dtype, contiguous: gates, then what they let through
    activation: str,  # one of ACTIVATIONS
) -> Tensor:  # [M, I] dtype
    """What `gate_ref` says."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    check_tensor("gate_up", gate_up, (num_rows, 2 * size), gate_up.dtype)
    y = torch.empty(num_rows, size, dtype=gate_up.dtype)
    _functions(f"{activation}_gate")[gate_up.dtype](gate_up.data_ptr(), num_rows, size, y.data_ptr())
    return y


def gate_ref(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gates) * up in float64, rounded once."""
    gates, up = gate_up.double().chunk(2, dim=-1)
    gates = F.silu(gates) if activation == "silu" else F.gelu(gates, approximate="tanh")
    return (gates * up).to(gate_up.dtype)
