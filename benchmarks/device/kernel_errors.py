"""Every kernel against its float64 reference, on random data."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from benchmarks.device.pages import Pages, make_pages
from benchmarks.device.scale import Scale
from specpaged.sampling.noise import ACCEPT, RECOVER, gumbel_noise, noise_keys, uniform
from specpaged_kernels.accept import Accepted, Written, accept, accept_ref, sample, sample_ref
from specpaged_kernels.limits import BLOCK_SIZES, HEAD_DIMS, fits
from specpaged_kernels.linear import linear
from specpaged_kernels.lm_head import lm_head
from specpaged_kernels.pack import pack, pack_ref
from specpaged_kernels.paged_attention import paged_attention
from specpaged_kernels.realign import realign, realign_ref
from specpaged_kernels.rejection import reject, reject_ref
from specpaged_kernels.rms_norm import rms_norm, rms_norm_ref
from specpaged_kernels.store_kv import store_kv, store_kv_ref


def run(scale: Scale) -> dict[str, Any]:
    """Per kernel and dtype: the largest error, in units of the dtype's epsilon times the largest result."""
    results: dict[str, Any] = {}
    for dtype in scale.dtypes:
        name = str(dtype).removeprefix("torch.")
        results[name] = {
            "paged_attention": _attention_errors(scale, dtype),
            "linear": _linear_errors(scale, dtype),
            "lm_head": _lm_head_is_linears(scale, dtype),
            "rms_norm": _norm_error(scale, dtype),
            "store_kv": _store_is_exact(scale, dtype),
            "realign": _realign_is_exact(scale, dtype),
        }
    results["float32"] = results.get("float32", {}) | {
        "sample": _sample_is_exact(scale),
        "accept": _accept_is_exact(scale),
        "reject": _reject_is_exact(scale),
    }
    results["int32"] = {"pack": _pack_is_exact(scale)}
    return results


def _error(got: Tensor, expected: Tensor) -> dict[str, float]:
    worst = (got.double() - expected).abs().max().item()
    return {"error_in_eps": worst / (torch.finfo(got.dtype).eps * expected.abs().max().item())}


def _random(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(*shape, dtype=dtype, device=device)


def attention_in_float64(
    pages: Pages, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None
) -> Tensor:
    """[N, Hq, D] float64."""
    outputs = []
    bounds = pages.cu_query_lens.tolist()
    for b, context_len in enumerate(pages.context_lens.tolist()):
        keys, values = (x.double() for x in pages.dense(b))
        query = pages.query[bounds[b] : bounds[b + 1]].double()  # [T, Hq, D]
        group = query.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))  # [L, Hq, D]
        scores = torch.einsum("thd,lhd->htl", query, keys) / math.sqrt(query.shape[-1])
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        last = (context_len + torch.arange(len(query), device=query.device))[:, None]
        positions = torch.arange(len(keys), device=query.device)
        hidden = positions > last
        if window is not None:
            hidden |= positions <= last - window
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(-1, len(query), 1)], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : len(keys)]
        outputs.append(torch.einsum("htl,lhd->thd", weights, values))
    return torch.cat(outputs)


def _attention_errors(scale: Scale, dtype: torch.dtype) -> dict[str, float]:
    """At the shapes that are timed, and one case for every head_dim, size of block and kind of layer."""
    longest, most = max(scale.context_lens[:2]), max(scale.query_lens)
    lengths = [1, most, 0, 2 * most + 7], [longest, longest // 3, 9, longest - 5]
    cases = [(scale.head_dim, group, scale.block_size, "plain") for group in scale.groups]
    if scale.on_gpu:
        for head_dim in (d for d in HEAD_DIMS if fits(d, dtype)):
            small, large = BLOCK_SIZES
            cases += [(head_dim, 2, small, "softcap"), (head_dim, 8, small, "window"), (head_dim, 2, large, "sinks")]
    errors = {}
    for head_dim, group, block_size, kind in cases:
        pages = make_pages(
            *lengths, num_kv_heads=scale.num_kv_heads, group=group, head_dim=head_dim, block_size=block_size,
            dtype=dtype, device=scale.device,
        )  # fmt: skip
        sinks = torch.linspace(-1, 2, group * scale.num_kv_heads, device=scale.device)
        kinds = {"plain": {}, "softcap": {"softcap": 20.0}, "sinks": {"sinks": sinks}, "window": {"window": 500}}
        options = kinds[kind]
        got = paged_attention(*pages.arguments, **options)
        name = f"D {head_dim}, group {group}, blocks of {block_size}, {kind}"
        errors[name] = _error(got, attention_in_float64(pages, **options))["error_in_eps"]
    return errors


def _linear_errors(scale: Scale, dtype: torch.dtype) -> dict[str, float]:
    """Each weight whole, as splits of K follow from its shape, and with a bias at the most rows."""
    errors = {}
    for name, (n, k, _) in scale.linear_shapes.items():
        weight = _random(n, k, dtype=dtype, device=scale.device) / k**0.5
        bias = _random(n, dtype=dtype, device=scale.device)
        worst = 0.0
        for rows in (scale.linear_rows[0], scale.linear_rows[-1], scale.linear_rows[-1] + 1):
            x = _random(rows, k, dtype=dtype, device=scale.device)
            expected = torch.cat([x.double() @ part.double().T for part in weight.split(16384)], dim=1)
            worst = max(worst, _error(linear(x, weight), expected)["error_in_eps"])
            worst = max(worst, _error(linear(x, weight, bias), expected + bias.double())["error_in_eps"])
        errors[name] = worst
    return errors


def _lm_head_is_linears(scale: Scale, dtype: torch.dtype) -> bool:
    """The tokens of the running argmax are those of the logits that linear gives."""
    k = next(iter(scale.linear_shapes.values()))[1]
    weight = _random(scale.vocab_size, k, dtype=dtype, device=scale.device)
    x = _random(7, k, dtype=dtype, device=scale.device)
    return torch.equal(lm_head(x, weight)[0], sample(linear(x, weight).float())[0])


def _norm_error(scale: Scale, dtype: torch.dtype) -> dict[str, float]:
    worst = {"error_in_eps": 0.0}
    for size, offset in ((next(iter(scale.linear_shapes.values()))[1], 0.0), (128, 1.0)):
        x, weight = (_random(*shape, dtype=dtype, device=scale.device) for shape in ((64, size), (size,)))
        residual = _random(64, size, dtype=dtype, device=scale.device)
        expected = rms_norm_ref((x + residual).double(), weight.double(), 1e-6, None, offset)
        error = _error(rms_norm(x, weight, 1e-6, residual, offset), expected)
        worst = max(worst, error, key=lambda e: max(e.values()))
    return worst


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
    caches = [_random(2, 450, 2, scale.num_kv_heads, scale.head_dim, dtype=dtype, device=scale.device)]
    caches.append(caches[0].clone())
    slots = torch.tensor([2, 190, 300], device=scale.device)
    lengths, shifts = (torch.tensor(x, dtype=torch.int32, device=scale.device) for x in ([140, 9, 77], [5, -40, 73]))
    realign(caches[0], slots, lengths, shifts)
    realign_ref(caches[1], slots, lengths, shifts)
    return torch.equal(*caches)


def _sampled_rows(scale: Scale) -> dict[str, Any]:
    """Logits of ragged drafts with ties, their noise, and drafts of which some are the rows' own samples."""
    counts = [5, 0, 3, 1]
    rows = sum(counts) + len(counts)
    logits = _random(rows, scale.vocab_size, dtype=torch.float32, device=scale.device).round(decimals=1)
    seeds, output_idx = [7] * rows, list(range(rows))
    keys = noise_keys(seeds, output_idx, scale.device)
    noise = gumbel_noise(seeds, output_idx, scale.vocab_size, scale.device)
    keys[:3, 3], noise[:3] = 0, 0  # the first rows are greedy
    best = (logits + noise).argmax(-1).tolist()
    drafts, row = torch.zeros(len(counts), max(counts), dtype=torch.int64), 0
    for b, count in enumerate(counts):
        for j in range(count):
            drafts[b, j] = best[row + j] if j != 2 else 0
        row += count + 1
    cu_rows = torch.tensor([0, *[c + 1 for c in counts]]).cumsum(0).to(torch.int32).to(scale.device)
    return {
        "counts": counts, "logits": logits, "keys": keys, "noise": noise, "drafts": drafts.to(scale.device),
        "cu_rows": cu_rows, "seeds": seeds, "output_idx": output_idx,
    }  # fmt: skip


def _sample_is_exact(scale: Scale) -> bool:
    rows = _sampled_rows(scale)
    ours, theirs = sample(rows["logits"], rows["keys"]), sample_ref(rows["logits"], rows["noise"])
    return torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


def _same(got: Accepted, expected: Accepted, names: tuple[str, ...]) -> bool:
    emitted = zip(got.token_ids, expected.token_ids, expected.num_outputs.tolist(), strict=True)
    return all(torch.equal(getattr(got, name), getattr(expected, name)) for name in names) and all(
        torch.equal(ours[:n], theirs[:n]) for ours, theirs, n in emitted
    )


def _accept_is_exact(scale: Scale) -> bool:
    rows = _sampled_rows(scale)
    query_lens = torch.tensor([c + 1 for c in rows["counts"]], dtype=torch.int32, device=scale.device)
    context_lens = torch.tensor([60, 3, 127, 64], dtype=torch.int32, device=scale.device)
    table = torch.arange(1, 41, dtype=torch.int32, device=scale.device).view(4, 10)
    written = [Written(query_lens, context_lens, table.clone(), 16) for _ in range(2)]
    got = accept(rows["logits"], rows["drafts"], rows["cu_rows"], rows["keys"], written[0])
    expected = accept_ref(rows["logits"], rows["drafts"], rows["cu_rows"], rows["noise"], written[1])
    names = ("num_outputs", "num_accepted", "ok", "context_lens", "num_blocks")
    return _same(got, expected, names) and torch.equal(written[0].page_table, written[1].page_table)


def _reject_is_exact(scale: Scale) -> bool:
    rows = _sampled_rows(scale)
    seeds, output_idx = rows["seeds"], rows["output_idx"]
    recover_keys = noise_keys(seeds, output_idx, scale.device, RECOVER)
    recover_noise = gumbel_noise(seeds, output_idx, scale.vocab_size, scale.device, RECOVER)
    uniforms = torch.tensor([uniform(s, t, ACCEPT) for s, t in zip(seeds, output_idx, strict=True)])
    uniforms = uniforms.double().to(scale.device)
    draft_rows = [r for r in range(len(rows["logits"])) if r + 1 not in rows["cu_rows"].tolist()]
    probs = _random(len(draft_rows), scale.vocab_size, dtype=torch.float32, device=scale.device)
    probs = (rows["logits"][draft_rows] + probs).softmax(-1)
    draws = rows["keys"][:, 3] != 0
    return all(
        _same(
            reject(rows["logits"], rows["drafts"], rows["cu_rows"], p, uniforms, rows["keys"], recover_keys),
            reject_ref(
                rows["logits"], rows["drafts"], rows["cu_rows"], p, uniforms, rows["noise"], draws, recover_noise
            ),
            ("num_outputs", "num_accepted", "ok"),
        )
        for p in (None, probs)
    )


def _pack_is_exact(scale: Scale) -> bool:
    int32 = {"dtype": torch.int32, "device": scale.device}
    arguments = (
        torch.arange(3 * 1600, **int32).view(3, 1600),
        torch.tensor([1500, 0, 63], **int32), torch.tensor([1505, 5, 66], **int32), torch.tensor([5, 1, 3], **int32),
        torch.randint(1, 99, (3, 120), **int32), 16, 20, 12, 40, 8, 1024,
    )  # fmt: skip
    got = pack(*arguments)
    expected = pack_ref(*(x.cpu() if isinstance(x, Tensor) else x for x in arguments))
    names = ("token_ids", "positions", "slot_mapping", "cu_query_lens", "logits_idx", "cu_logits")
    pairs = [(getattr(got, name), getattr(expected, name)) for name in names]
    pairs += [(getattr(got.work_list, name), getattr(expected.work_list, name)) for name in ("item_seq", "cu_items")]
    return all(torch.equal(ours.cpu(), theirs) for ours, theirs in pairs)
