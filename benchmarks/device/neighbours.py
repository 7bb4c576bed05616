"""Attention of other libraries on the same pages, where they are installed and take the shape.

Each maker returns a call and, untimed, prepares what the library wants: KV copied into its own layout included.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.device.pages import Pages

Call = Callable[[], torch.Tensor]


def sdpa_per_sequence(pages: Pages) -> Call:
    """torch's SDPA, one call a sequence, on KV that lies dense already."""
    from torch.nn.attention.bias import causal_lower_right

    parts = []
    bounds = pages.cu_query_lens.tolist()
    for b, length in enumerate(pages.lengths):
        query = pages.query[bounds[b] : bounds[b + 1]].transpose(0, 1)[None]  # [1, Hq, T, D]
        keys, values = (x.transpose(0, 1)[None].contiguous() for x in pages.dense(b))
        mask = causal_lower_right(query.shape[2], length) if query.shape[2] > 1 else None
        parts.append((query.contiguous(), keys, values, mask))

    def call() -> torch.Tensor:
        outputs = [F.scaled_dot_product_attention(q, k, v, attn_mask=m, enable_gqa=True) for q, k, v, m in parts]
        return torch.cat([output[0].transpose(0, 1) for output in outputs])

    return call


def torch_varlen(pages: Pages) -> Call:
    """torch.nn.attention.varlen, on our own pages."""
    from torch.nn.attention.varlen import varlen_attn

    keys, values = _paged(pages)
    seqused = torch.tensor(pages.lengths, dtype=torch.int32, device=pages.query.device)
    max_q, max_k = int(pages.cu_query_lens.diff().max()), max(pages.lengths)
    # Causal with the last query at the last key.
    return lambda: varlen_attn(
        pages.query, keys, values, pages.cu_query_lens, None, max_q, max_k,
        window_size=(-1, 0), enable_gqa=True, seqused_k=seqused, block_table=pages.page_table,
    )  # fmt: skip


def torch_varlen_dense(pages: Pages) -> Call:
    """The same on packed KV without pages, which older flash attention needs for small pages."""
    from torch.nn.attention.varlen import varlen_attn

    dense = [pages.dense(b) for b in range(len(pages.lengths))]
    keys, values = (torch.cat([part[i] for part in dense]) for i in (0, 1))
    bounds = torch.tensor([0, *pages.lengths], device=keys.device).cumsum(0).to(torch.int32)
    max_q, max_k = int(pages.cu_query_lens.diff().max()), max(pages.lengths)
    return lambda: varlen_attn(
        pages.query, keys, values, pages.cu_query_lens, bounds, max_q, max_k, window_size=(-1, 0), enable_gqa=True
    )


def xformers_split_k(pages: Pages) -> Call:
    """xformers' Triton split-K on its paged mask; uniform query lengths only."""
    from xformers.ops import fmha
    from xformers.ops.fmha.attn_bias import PagedBlockDiagonalCausalWithOffsetPaddedKeysMask as Mask

    query_lens = pages.cu_query_lens.diff().tolist()
    keys, values = _paged(pages)
    num_blocks, block_size, num_kv_heads, head_dim = keys.shape
    group = pages.query.shape[1] // num_kv_heads
    mask = Mask.from_seqlens(query_lens, pages.lengths, pages.page_table, block_size, device=pages.query.device)
    q = pages.query.view(1, -1, num_kv_heads, group, head_dim)
    k, v = (
        x.reshape(1, num_blocks * block_size, num_kv_heads, 1, head_dim).expand(-1, -1, -1, group, -1)
        for x in (keys, values)
    )
    return lambda: fmha.memory_efficient_attention_forward(q, k, v, attn_bias=mask, op=fmha.triton_splitk.FwOp)


def flashinfer_paged(pages: Pages) -> Call:
    """FlashInfer's paged prefill (its decode, where there is one query token)."""
    import flashinfer

    keys, _ = _paged(pages)
    _, block_size, num_kv_heads, head_dim = keys.shape
    num_pages = [-(-length // block_size) for length in pages.lengths]
    indptr = torch.tensor([0, *num_pages], dtype=torch.int32, device=keys.device).cumsum(0).to(torch.int32)
    indices = torch.cat([pages.page_table[b, :n] for b, n in enumerate(num_pages)])
    last = torch.tensor([(n - 1) % block_size + 1 for n in pages.lengths], dtype=torch.int32, device=keys.device)
    cache = pages.kv_pool.view(-1, block_size, 2, num_kv_heads, head_dim).transpose(1, 2).contiguous()
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=keys.device)
    num_heads = pages.query.shape[1]
    if int(pages.cu_query_lens.diff().max()) == 1:
        decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        decode.plan(indptr, indices, last, num_heads, num_kv_heads, head_dim, block_size, q_data_type=pages.query.dtype)
        return lambda: decode.run(pages.query, cache)
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    prefill.plan(
        pages.cu_query_lens, indptr, indices, last, num_heads, num_kv_heads, head_dim, block_size, causal=True,
        q_data_type=pages.query.dtype,
    )  # fmt: skip
    return lambda: prefill.run(pages.query, cache)


def _paged(pages: Pages) -> tuple[torch.Tensor, torch.Tensor]:
    """[P, S, Hkv, D] views of the pool."""
    pool = pages.kv_pool.view(-1, pages.block_size, *pages.kv_pool.shape[1:])
    return pool[:, :, 0], pool[:, :, 1]


NEIGHBOURS: dict[str, Callable[[Pages], Call]] = {
    "torch SDPA per sequence": sdpa_per_sequence,
    "torch varlen, paged": torch_varlen,
    "torch varlen, dense KV": torch_varlen_dense,
    "xformers split-K": xformers_split_k,
    "FlashInfer": flashinfer_paged,
}
