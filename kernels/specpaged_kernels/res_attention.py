"""Clover's attention between a hidden state and a token's embedding, behind its three projections.

Each head h of a row adds to its share of x what the embedding gives, as far as the two point the same way:

    x            [ h0      | h1      | ... ]      query, key, value alike
    output       [ x + cos(query_h, key_h) * value_h  |  embedded, if it is asked for ]

One program runs a head of a row, so that a row comes out the same among any others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from specpaged_kernels.jit import TYPES, Variant, kernel
from specpaged_kernels.limits import DTYPES

BLOCKS = (64, 128, 256, 1024)  # elements of a head, the next of these


@kernel("x", "query", "key_value", "embedded", "output", "stride_x", "stride_query", "stride_key_value",
        "stride_embedded", "stride_output")  # fmt: skip
def _res_attention_kernel(
    x, query, key_value, embedded, output, size, head_size, eps, stride_x, stride_query, stride_key_value,
    stride_embedded, stride_output, BLOCK: tl.constexpr, HAS_EMBEDDED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < head_size
    columns += tl.program_id(1) * head_size
    q = tl.load(query + row * stride_query + columns, mask=mask, other=0.0).to(tl.float32)
    k = tl.load(key_value + row * stride_key_value + columns, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(key_value + row * stride_key_value + size + columns, mask=mask, other=0.0).to(tl.float32)
    lengths = tl.maximum(tl.sqrt(tl.sum(q * q, 0)), eps) * tl.maximum(tl.sqrt(tl.sum(k * k, 0)), eps)
    cosine = tl.sum(q * k, 0) / lengths
    values = tl.load(x + row * stride_x + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(output + row * stride_output + columns, (values + cosine * v).to(output.dtype.element_ty), mask=mask)
    if HAS_EMBEDDED:
        values = tl.load(embedded + row * stride_embedded + columns, mask=mask)
        tl.store(output + row * stride_output + size + columns, values, mask=mask)


def _block(head_size: int) -> int:
    for block in BLOCKS:
        if head_size <= block:
            return block
    raise ValueError(f"x has heads of {head_size}; allowed: up to {BLOCKS[-1]}")


def _constants(block: int, has_embedded: bool) -> dict[str, Any]:
    num_warps = max(1, block // 256)
    return {"BLOCK": block, "HAS_EMBEDDED": has_embedded, "num_warps": num_warps, "enable_fp_fusion": False}


def variants() -> Iterator[Variant]:
    """All that `res_attention` launches."""
    for dtype in DTYPES:
        names = ("x", "query", "key_value", "embedded", "output")
        types = {name: f"*{TYPES[dtype]}" for name in names} | {"eps": "fp32"}
        for block in BLOCKS:
            for has_embedded in (False, True):
                yield Variant(_res_attention_kernel, types, _constants(block, has_embedded))


def res_attention(
    x: Tensor,  # [N, H] dtype
    query: Tensor,  # [N, H] dtype
    key_value: Tensor,  # [N, 2 H] dtype: all heads' keys, then their values
    num_heads: int,
    eps: float,
    embedded: Tensor | None = None,  # [N, H] dtype: comes behind the output
) -> Tensor:  # [N, H] dtype; [N, 2 H] with `embedded`
    """What `res_attention_ref` says. Rows are contiguous; nothing waits for the device."""
    num_rows, size = x.shape
    output = x.new_empty(num_rows, size if embedded is None else 2 * size)
    source = x if embedded is None else embedded
    _res_attention_kernel[(num_rows, num_heads)](
        x, query, key_value, source, output, size, size // num_heads, eps, x.stride(0), query.stride(0),
        key_value.stride(0), source.stride(0), output.stride(0),
        **_constants(_block(size // num_heads), embedded is not None),
    )  # fmt: skip
    return output


def res_attention_ref(
    x: Tensor, query: Tensor, key_value: Tensor, num_heads: int, eps: float, embedded: Tensor | None = None
) -> Tensor:
    """x + cos(q, k) * v of each head in float64, rounded once; lengths below eps count as eps."""
    of_heads = (part.double().unflatten(-1, (num_heads, -1)) for part in (query, *key_value.chunk(2, dim=-1)))
    q, k, v = of_heads
    output = (x.double() + (F.cosine_similarity(q, k, dim=-1, eps=eps)[..., None] * v).flatten(-2)).to(x.dtype)
    return output if embedded is None else torch.cat((output, embedded), dim=-1)
