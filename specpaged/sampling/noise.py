"""Noise that is a pure function of (seed, output index, token id).

Two layers. Per (seed, output index), the host derives 96 key bits by SplitMix64's finaliser, in Python ints. Per
token id, those keys enter two rounds of the 32-bit finaliser "lowbias32" (C. Wellons' hash prospector) in int32
tensor operations that wrap: 25 per element, where Philox-4x32-10 takes some 50, in int64, for which CPUs lack
vector multiplies. Each round is a bijection with near-ideal avalanche, so ids next to each other get unrelated
bits; so do neighbouring seeds and indices, whose keys went through a 64-bit avalanche before.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from specpaged.sampling.elementwise import log_fp32_

# What a draw is for. Draws for different purposes at the same (seed, output index) are independent.
SAMPLE, ACCEPT, RECOVER = 0, 1, 2

_MASK64 = 2**64 - 1
_CHUNK_ELEMENTS = 2**17  # temporaries of this size stay in a core's cache


def _mix64(x: int) -> int:
    """SplitMix64's step: a bijection of 64-bit ints."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _key(seed: int, output_idx: int, purpose: int) -> int:
    """The state of (seed, output index, purpose): distinct for distinct pairs of one seed and purpose."""
    return _mix64(_mix64(_mix64(seed & _MASK64) ^ purpose) ^ output_idx)


def uniform(seed: int, output_idx: int, purpose: int) -> float:
    """One float64 in (0, 1), never 0 or 1."""
    return ((_mix64(_key(seed, output_idx, purpose)) >> 11) + 0.5) * 2.0**-53


def _int32(x: int) -> int:
    x &= 0xFFFFFFFF
    return x - 2**32 if x >= 2**31 else x


@functools.lru_cache(maxsize=8)
def _token_ids(vocab_size: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(vocab_size, dtype=torch.int32, device=device)


def _xor_shift_(x: Tensor, shift: int) -> None:
    """x ^= x >>> shift. The mask makes torch's arithmetic shift a logical one."""
    x ^= (x >> shift).bitwise_and_((1 << (32 - shift)) - 1)


def _lowbias32_(x: Tensor) -> Tensor:
    """[...] int32, in place."""
    _xor_shift_(x, 16)
    x *= _int32(0x7FEB352D)
    _xor_shift_(x, 15)
    x *= _int32(0x846CA68B)
    _xor_shift_(x, 16)
    return x


def row_keys(seed: int, output_idx: int, purpose: int = SAMPLE) -> tuple[int, int, int]:
    """The three keys of a row's noise, from 0 to 2^32 - 1."""
    first = _key(seed, output_idx, purpose)
    return first & 0xFFFFFFFF, first >> 32, _mix64(first) & 0xFFFFFFFF


def noise_keys(
    seeds: Sequence[int], output_idx: Sequence[int], device: torch.device | str, purpose: int = SAMPLE
) -> Tensor:
    """[M, 4] int32: the three keys of each (seed, output index) pair, and 1."""
    of_rows = (row_keys(seed, t, purpose) for seed, t in zip(seeds, output_idx, strict=True))
    keys = [(*map(_int32, of_row), 1) for of_row in of_rows]
    return torch.tensor(keys, dtype=torch.int32, device=device)


def hash_bits(
    seeds: Sequence[int], output_idx: Sequence[int], vocab_size: int, device: torch.device | str, purpose: int = SAMPLE
) -> Tensor:
    """[M, V] int32: 32 bits for every (seed, output index) pair and token id 0 .. V-1."""
    k0, k1, k2, _ = noise_keys(seeds, output_idx, device, purpose).T.unsqueeze(-1)  # [M, 1] each
    bits = _lowbias32_(_token_ids(vocab_size, torch.device(device)) ^ k0)
    return _lowbias32_(bits.add_(k1)).bitwise_xor_(k2)


def gumbel_noise(
    seeds: Sequence[int], output_idx: Sequence[int], vocab_size: int, device: torch.device | str, purpose: int = SAMPLE
) -> Tensor:
    """[M, V] fp32: a standard Gumbel variate for every (seed, output index) pair and token id, in [-2.9, 22.2].

    The low 31 bits make w in (0, 1), fine-grained near 0; the variate is -ln(-ln(1 - w)), whose large values, the ones
    that decide an argmax, come from small w. Depends on nothing but (seed, output index, token id, purpose).
    """
    noise = torch.empty(len(seeds), vocab_size, dtype=torch.float32, device=device)
    rows = len(seeds) if noise.device.type != "cpu" else max(1, _CHUNK_ELEMENTS // vocab_size)
    for start in range(0, len(seeds), rows):
        part = slice(start, start + rows)
        bits = hash_bits(seeds[part], output_idx[part], vocab_size, device, purpose).bitwise_and_(2**31 - 1)
        noise[part] = _gumbel(bits)
    return noise


def _gumbel(bits: Tensor) -> Tensor:
    """[...] int32 >= 0 -> fp32."""
    w = bits.to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    u = 1.0 - w
    # ln(1 - w) = ln u - (w - (1 - u)) / u to first order: what rounding took from u comes back.
    rounding = (u - 1.0).add_(w).div_(u)
    return log_fp32_(rounding.sub_(log_fp32_(u))).neg_()
