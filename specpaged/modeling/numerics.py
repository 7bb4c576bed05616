"""Which computation gives a row the same bits in every pass: fixed candidates in a fixed order, and a probe for each.

A choice is a function of the shape, dtype, device, thread count, CPU and library versions, never of the number of
draft tokens, a batch limit or a timing: two engines on one machine agree. Choices are cached per process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from specpaged.modeling.attention.folded import CHUNK, attend_chunked, attend_sdpa
from specpaged.modeling.linear import SMALL_WEIGHT, LinearScheme, RowExactLinear, can_pack, runs_cpp

PROBE_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 15, 16, 17, 20, 24, 28, 31, 32, 33, 36, 40, 48, 56, 64, 65, 80, 96,
              128, 160, 192, 256)  # fmt: skip
INTERPRETED_ROWS = (1, 6, 65)  # the same in Triton's interpreter: one row, one tile of rows, and more than one
ANY_ROWS = 2**30
MIN_PROBED_ROWS = 16  # whatever a row costs, this many are tried
PROBE_MACS = 2**33  # multiply-adds that the probe of one candidate may cost, beyond MIN_PROBED_ROWS
PROBE_WEIGHT = 2**26  # a wider layer is probed at the width that has this many weights

# KV lengths are rounded up to these within 512 positions; past 512, whole multiples of 512 and one of these.
KV_BUCKETS = ((64, 128, 192, 384, 512), (64, 128, 512), (512,))
KV_PERIOD = 512
MAX_FOLDED_ROWS = 256  # of one attention call; the rest of a long prefill follows in further calls


class InexactError(ValueError):
    """No candidate is exact: numerics="exact" cannot be had here."""


@dataclass(frozen=True)
class AttentionScheme:
    """How attention reduces over KV, for every layer of a model."""

    kernel: str  # "sdpa" | "chunked"; layers with soft-capping or sinks are chunked under both
    row_multiple: int  # folded rows of one call are filled up to it
    kv_buckets: tuple[int, ...]
    upcast: bool  # query, keys and values as float32
    query_piece: int  # query tokens of one sequence in one call

    @property
    def name(self) -> str:
        """What the start-up report calls the scheme."""
        kind = f"{'float32 ' if self.upcast else ''}{self.kernel} x{self.row_multiple}"
        return f"{kind}, KV in {'/'.join(map(str, self.kv_buckets))}"

    def padded_rows(self, rows: int) -> int:
        """The number of folded rows, filler included, that a call with `rows` of them is given."""
        return -(-rows // self.row_multiple) * self.row_multiple

    def kv_bucket(self, length: int) -> int:
        """The KV length, filled up with zeros, at which a sequence of this length is attended to."""
        whole, tail = divmod(length, KV_PERIOD)
        return whole * KV_PERIOD + next((b for b in self.kv_buckets if tail <= b), KV_PERIOD) if tail else length


FAST_KV_BUCKETS = tuple(range(CHUNK, KV_PERIOD + 1, CHUNK))


def fast_attention_scheme(dtype: torch.dtype, device: torch.device, group: int) -> AttentionScheme:
    """The scheme of numerics="fast"; `group` is Hq / Hkv."""
    return AttentionScheme("sdpa", 1, FAST_KV_BUCKETS, _upcasts(dtype, device), max(1, MAX_FOLDED_ROWS // group))


def _upcasts(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether attention computes in float32: bfloat16 on a CPU that has no units for it."""
    return dtype == torch.bfloat16 and device.type == "cpu" and not can_pack(dtype, device)


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(0x5EED)


def candidate_linear_schemes(
    n: int, k: int, dtype: torch.dtype, device: torch.device, backend: str = "torch"
) -> list[LinearScheme]:
    """The schemes to try for a weight [n, k], the preferred one first."""
    if backend == "triton":
        return [LinearScheme("triton", 1, 1, ANY_ROWS)]
    rows = PROBE_ROWS[-1]
    packed = LinearScheme("packed", 1, 2, rows)
    stock = [LinearScheme("stock", multiple, multiple, rows) for multiple in (4, 16)]
    order = [stock[0], packed, stock[1]] if n * k < SMALL_WEIGHT else [packed, *stock]
    order.append(LinearScheme("stock", 1, 1, 1))
    plain = [scheme for scheme in order if scheme.kernel != "packed" or can_pack(dtype, device)]
    ours = [LinearScheme("cpp", 1, 1, ANY_ROWS)] if backend == "cpp" and runs_cpp(dtype, device) else []
    if dtype == torch.float32:
        return [*ours, *plain]
    upcast = [
        replace(scheme, upcast=True) for scheme in order if scheme.kernel != "packed" or can_pack(torch.float32, device)
    ]
    if _upcasts(dtype, device):
        return [*ours, *upcast, *plain]
    return [*ours, *plain[:-1], *upcast[:-1], plain[-1]]


def probe_rows(n: int, k: int, interpreted: bool = False) -> tuple[int, ...]:
    """Row counts to try for a weight [n, k]: all of PROBE_ROWS, or the first of them that the budget allows."""
    if interpreted:
        return INTERPRETED_ROWS
    rows, macs = [], 0
    for count in PROBE_ROWS:
        macs += count * n * k
        if count > MIN_PROBED_ROWS and macs > PROBE_MACS:
            break
        rows.append(count)
    return tuple(rows)


def row_counts_that_differ(
    linear: Callable[[Tensor], Tensor], k: int, rows: Iterable[int], dtype: torch.dtype, device: torch.device
) -> list[int]:
    """The row counts at which some row of linear(x) [count, n] has other bits than in the largest batch.

    Each count is tried at the beginning, in the middle and at the end of the batch.
    """
    rows = sorted(rows)
    most = rows[-1]
    x = torch.randn(most, k, generator=_generator(device), device=device).to(dtype)
    expected = linear(x)
    different = []
    for count in rows:
        for start in {0, (most - count) // 2, most - count}:
            if not torch.equal(linear(x[start : start + count].clone()), expected[start : start + count]):
                different.append(count)
                break
    return different


def choose_linear_scheme(
    n: int, k: int, bias: bool, dtype: torch.dtype, device: torch.device, backend: str = "torch"
) -> LinearScheme:
    """The first exact candidate. Raises InexactError."""
    return _choose_linear_scheme(n, k, bias, dtype, device, torch.get_num_threads(), False, backend)


def choose_stock_scheme(n: int, k: int, bias: bool, dtype: torch.dtype, device: torch.device) -> LinearScheme:
    """The first exact candidate that calls F.linear on the model's own dtype.

    For a matrix product inside a module that is not ours: it can be given other rows and nothing else.
    """
    return _choose_linear_scheme(n, k, bias, dtype, device, torch.get_num_threads(), True, "torch")


@cache
@torch.inference_mode()
def _choose_linear_scheme(
    n: int,
    k: int,
    bias: bool,
    dtype: torch.dtype,
    device: torch.device,
    num_threads: int,
    stock_only: bool,
    backend: str,
) -> LinearScheme:
    probed_n = min(n, max(64, PROBE_WEIGHT // k // 64 * 64))
    generator = _generator(device)
    weight = (torch.randn(probed_n, k, generator=generator, device=device) / k**0.5).to(dtype)
    bias_values = torch.randn(probed_n, generator=generator, device=device).to(dtype) if bias else None
    rows = probe_rows(n, k, interpreted=backend == "triton" and device.type == "cpu")
    for scheme in candidate_linear_schemes(n, k, dtype, device, backend):
        if stock_only and (scheme.kernel != "stock" or scheme.upcast):
            continue
        if 1 < scheme.max_rows < ANY_ROWS:
            scheme = replace(scheme, max_rows=max(r for r in rows if r % scheme.row_multiple == 0))
        layer = RowExactLinear(weight, bias_values, scheme)
        if not row_counts_that_differ(layer, k, rows, dtype, device):
            return scheme
    raise InexactError(
        f"numerics='exact' is not possible here: no way to multiply by a {n} x {k} {dtype} weight on {device} with "
        f"{num_threads} threads gives a row the same bits in every batch; use numerics='fast'"
    )


def choose_attention_scheme(
    geometries: Iterable[tuple[int, int, int]], dtype: torch.dtype, device: torch.device
) -> AttentionScheme:
    """The first candidate that is exact for every (Hq, Hkv, D) of a model. Raises InexactError."""
    return _choose_attention_scheme(tuple(sorted(set(geometries))), dtype, device, torch.get_num_threads())


@cache
@torch.inference_mode()
def _choose_attention_scheme(
    geometries: tuple[tuple[int, int, int], ...], dtype: torch.dtype, device: torch.device, num_threads: int
) -> AttentionScheme:
    upcasts = [True] if _upcasts(dtype, device) else [False] if dtype == torch.float32 else [False, True]
    piece = max(1, MAX_FOLDED_ROWS // max(hq // hkv for hq, hkv, _ in geometries))
    candidates = [
        AttentionScheme("sdpa", multiple, buckets, upcast, piece)
        for upcast in upcasts
        for buckets in KV_BUCKETS
        for multiple in (4, 16)
    ]
    candidates += [AttentionScheme("chunked", multiple, FAST_KV_BUCKETS, True, piece) for multiple in (4, 16)]
    for scheme in candidates:
        kernels = {"sdpa": [attend_sdpa, attend_chunked], "chunked": [attend_chunked]}[scheme.kernel]
        if all(attention_is_exact(kernel, scheme, *g, dtype, device) for kernel in kernels for g in geometries):
            return scheme
    raise InexactError(
        f"numerics='exact' is not possible here: no form of attention in {dtype} on {device} with {num_threads} "
        f"threads gives a row the same bits in every batch; use numerics='fast'"
    )


def attention_is_exact(
    attend: Callable[..., Tensor],
    scheme: AttentionScheme,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether a row has the same bits alone and among others, in every KV bucket that can hold its sequence."""
    generator = _generator(device)
    compute_dtype = torch.float32 if scheme.upcast else dtype
    group = num_heads // num_kv_heads
    heads = min(num_kv_heads, 4)
    longest = 2 * KV_PERIOD + scheme.kv_buckets[0]

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype).to(compute_dtype)

    def run(query: Tensor, keys: Tensor, values: Tensor, bucket: int, last: int) -> Tensor:
        """query [G, T, heads, group, D]: tokens at last-T+1 .. last -> [G, heads, T * group, D]"""
        num_seqs, tokens = query.shape[:2]
        rows = tokens * group
        folded = query.permute(0, 2, 1, 3, 4).reshape(num_seqs, heads, rows, head_dim)
        padded = scheme.padded_rows(rows)
        folded = torch.nn.functional.pad(folded, (0, 0, 0, padded - rows))
        position = last - tokens + 1 + (torch.arange(padded, device=device) // group).clamp(max=tokens - 1)
        hidden = torch.zeros(padded, bucket, dtype=compute_dtype, device=device)
        hidden.masked_fill_(torch.arange(bucket, device=device) > position[:, None], float("-inf"))
        # As it is gathered from the pool.
        gathered = torch.zeros(num_seqs, bucket, 2, heads, head_dim, dtype=compute_dtype, device=device)
        gathered[:, : last + 1, 0], gathered[:, : last + 1, 1] = keys[:, : last + 1], values[:, : last + 1]
        keys, values = gathered.permute(2, 0, 3, 1, 4).unbind(0)
        out = attend(folded, keys, values, hidden.expand(num_seqs, 1, padded, bucket), None)
        return out[:, :, :rows]

    edges = [1, *scheme.kv_buckets, KV_PERIOD + 1, KV_PERIOD + scheme.kv_buckets[0], longest]
    lengths = sorted({n for edge in edges for n in (edge - 1, edge, edge // 2 + 7) if 1 <= n <= longest})
    tokens_tried = (2, 3, 5, 6, 8, 17, min(33, scheme.query_piece), scheme.query_piece)
    for i, length in enumerate(lengths):
        tokens = min(tokens_tried[i % len(tokens_tried)], length)
        mates = 1 + i % 3
        query = random(mates, tokens, heads, group, head_dim)
        keys, values = random(mates, length, heads, head_dim), random(mates, length, heads, head_dim)
        bucket = scheme.kv_bucket(length)
        together = run(query, keys, values, bucket, length - 1)
        # One token alone, in the smallest bucket that holds it and in larger ones.
        for token in {0, tokens // 2, tokens - 1}:
            last = length - tokens + token
            for size in {scheme.kv_bucket(last + 1), bucket, scheme.kv_bucket(length + KV_PERIOD)}:
                alone = run(query[:1, token : token + 1], keys[:1], values[:1], size, last)
                if not torch.equal(alone, together[:1, :, token * group : (token + 1) * group]):
                    return False
    return True
