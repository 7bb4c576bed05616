"""Every kernel against its float64 reference, on random data."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from benchmarks.device.pages import Pages, make_pages
from benchmarks.device.scale import Scale
from specpaged_kernels.accept import Written, accept, accept_ref
from specpaged_kernels.linear import linear
from specpaged_kernels.pack import pack, pack_ref
from specpaged_kernels.paged_attention import paged_attention
from specpaged_kernels.realign import realign, realign_ref
from specpaged_kernels.rms_norm import rms_norm, rms_norm_ref
from specpaged_kernels.store_kv import store_kv, store_kv_ref


def run(scale: Scale) -> dict[str, Any]:
    """Per kernel and dtype: the largest error, in units of the dtype's epsilon times the largest result."""
    results: dict[str, Any] = {}
    for dtype in scale.dtypes:
        name = str(dtype).removeprefix("torch.")
        results[name] = {
            "paged_attention": _attention_error(scale, dtype),
            "linear": _linear_error(scale, dtype),
            "rms_norm": _norm_error(scale, dtype),
            "store_kv": _store_is_exact(scale, dtype),
            "realign": _realign_is_exact(scale, dtype),
        }
    results["float32"] = results.get("float32", {}) | {"accept": _accept_is_exact(scale)}
    results["int32"] = {"pack": _pack_is_exact(scale)}
    return results


def _error(got: Tensor, expected: Tensor) -> dict[str, float]:
    worst = (got.double() - expected).abs().max().item()
    return {"error_in_eps": worst / (torch.finfo(got.dtype).eps * expected.abs().max().item())}


def _random(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(*shape, dtype=dtype, device=device)


def attention_in_float64(pages: Pages) -> Tensor:
    """[N, Hq, D] float64."""
    outputs = []
    bounds = pages.cu_query_lens.tolist()
    for b, context_len in enumerate(pages.context_lens.tolist()):
        keys, values = (x.double() for x in pages.dense(b))
        query = pages.query[bounds[b] : bounds[b + 1]].double()  # [T, Hq, D]
        group = query.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))  # [L, Hq, D]
        scores = torch.einsum("thd,lhd->htl", query, keys) / math.sqrt(query.shape[-1])
        positions = context_len + torch.arange(len(query), device=query.device)
        hidden = torch.arange(len(keys), device=query.device) > positions[:, None]
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
        outputs.append(torch.einsum("htl,lhd->thd", weights, values))
    return torch.cat(outputs)


def _attention_error(scale: Scale, dtype: torch.dtype) -> dict[str, float]:
    longest = max(scale.context_lens[:2])
    worst = {"error_in_eps": 0.0}
    for group in scale.groups:
        pages = make_pages(
            [1, max(scale.query_lens), 0, 2 * max(scale.query_lens) + 7], [longest, longest // 3, 9, longest - 5],
            num_kv_heads=scale.num_kv_heads, group=group, head_dim=scale.head_dim, block_size=scale.block_size,
            dtype=dtype, device=scale.device,
        )  # fmt: skip
        worst = max(
            worst, _error(paged_attention(*pages.arguments), attention_in_float64(pages)), key=lambda e: max(e.values())
        )
    return worst


def _linear_error(scale: Scale, dtype: torch.dtype) -> dict[str, float]:
    worst = {"error_in_eps": 0.0}
    for n, k, _ in scale.linear_shapes.values():
        weight = _random(min(n, 4096), k, dtype=dtype, device=scale.device) / k**0.5
        for rows in (scale.linear_rows[0], scale.linear_rows[-1], scale.linear_rows[-1] + 1):
            x = _random(rows, k, dtype=dtype, device=scale.device)
            expected = x.double() @ weight.double().T
            worst = max(worst, _error(linear(x, weight), expected), key=lambda e: max(e.values()))
    return worst


def _norm_error(scale: Scale, dtype: torch.dtype) -> dict[str, float]:
    size = next(iter(scale.linear_shapes.values()))[1]
    x, weight = _random(64, size, dtype=dtype, device=scale.device), _random(size, dtype=dtype, device=scale.device)
    expected = rms_norm_ref(x.double(), weight.double(), 1e-6)
    return _error(rms_norm(x, weight, 1e-6), expected)


def _store_is_exact(scale: Scale, dtype: torch.dtype) -> bool:
    shape = (37, scale.num_kv_heads, scale.head_dim)
    keys, values = (_random(*shape, dtype=dtype, device=scale.device) for _ in range(2))
    slots = torch.randperm(128, device=scale.device)[:37]
    pools = [torch.zeros(128, 2, *shape[1:], dtype=dtype, device=scale.device) for _ in range(2)]
    num_stored = torch.tensor(33, dtype=torch.int32, device=scale.device)
    store_kv(keys, values, pools[0], slots, num_stored)
    store_kv_ref(keys, values, pools[1], slots, num_stored)
    return torch.equal(*pools)


def _realign_is_exact(scale: Scale, dtype: torch.dtype) -> bool:
    cache = _random(3, scale.num_kv_heads, 150, scale.head_dim, dtype=dtype, device=scale.device)
    starts, lengths = (torch.tensor(x, dtype=torch.int32, device=scale.device) for x in ([2, 40, 0], [140, 9, 77]))
    return torch.equal(realign(cache, starts, lengths, 141), realign_ref(cache, starts, lengths, 141))


def _accept_is_exact(scale: Scale) -> bool:
    counts = [5, 0, 3, 1]
    rows = sum(counts) + len(counts)
    logits = _random(rows, scale.vocab_size, dtype=torch.float32, device=scale.device).round(decimals=1)  # with ties
    best = logits.argmax(-1).tolist()
    drafts = torch.zeros(len(counts), max(counts), dtype=torch.int64)
    row = 0
    for b, count in enumerate(counts):
        for j in range(count):
            drafts[b, j] = best[row + j] if j != 2 else 0
        row += count + 1
    cu_rows = torch.tensor([0, *[c + 1 for c in counts]]).cumsum(0).to(torch.int32).to(scale.device)
    query_lens = torch.tensor([c + 1 for c in counts], dtype=torch.int32, device=scale.device)
    context_lens = torch.tensor([60, 3, 127, 64], dtype=torch.int32, device=scale.device)
    table = torch.arange(1, 41, dtype=torch.int32, device=scale.device).view(4, 10)
    written = [Written(query_lens, context_lens, table.clone(), 16) for _ in range(2)]
    got = accept(logits, drafts.to(scale.device), cu_rows, None, written[0])
    expected = accept_ref(logits, drafts.to(scale.device), cu_rows, None, written[1])
    same = all(
        torch.equal(getattr(got, name), getattr(expected, name))
        for name in ("num_outputs", "num_accepted", "ok", "context_lens", "num_blocks")
    )
    emitted = zip(got.token_ids, expected.token_ids, expected.num_outputs.tolist(), strict=True)
    return (
        same
        and torch.equal(written[0].page_table, written[1].page_table)
        and all(torch.equal(ours[:n], theirs[:n]) for ours, theirs, n in emitted)
    )


def _pack_is_exact(scale: Scale) -> bool:
    int32 = {"dtype": torch.int32, "device": scale.device}
    known = torch.arange(11, 18, device=scale.device)
    arguments = (
        known, torch.tensor([0, 1, 6, 7], **int32), torch.arange(30, 42, device=scale.device).view(3, 4),
        torch.tensor([4, 0, 2], **int32), torch.tensor([5, 1, 3], **int32), torch.tensor([1500, 0, 63], **int32),
        torch.randint(1, 99, (3, 120), **int32), 16, 20, 12, 40, 8, 1024,
    )  # fmt: skip
    got = pack(*arguments)
    expected = pack_ref(*(x.cpu() if isinstance(x, Tensor) else x for x in arguments))
    names = ("token_ids", "positions", "slot_mapping", "cu_query_lens", "logits_idx", "cu_logits")
    pairs = [(getattr(got, name), getattr(expected, name)) for name in names]
    pairs += [(getattr(got.work_list, name), getattr(expected.work_list, name)) for name in ("item_seq", "cu_items")]
    return all(torch.equal(ours.cpu(), theirs) for ours, theirs in pairs)
