"""Which tiles are quick on a device: those of `choose_tiles` beside others, at shapes where attention waits for its
loads and at shapes where it waits for bandwidth; and the exact linear's, with K in more or fewer splits.

Whatever is found holds for every row of every pass, or a row's bits would depend on its pass.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.device.pages import Pages, make_pages
from benchmarks.device.scale import Scale
from benchmarks.device.timing import Timer
from specpaged_kernels import linear, paged_attention
from specpaged_kernels.paged_attention import WorkList, work_list_ref

# (B, context, query tokens); the first is what all candidates are compiled on.
SHAPES = ((1, 1024, 1), (1, 1024, 6), (1, 16384, 1), (8, 4096, 6), (32, 1024, 6), (32, 4096, 1), (64, 8192, 6))
SMOKE_SHAPES = ((1, 20, 1),)
ROWS = (1, 48)
SHARED_BYTES = 220_000  # of a block's shared memory on sm_90
JOBS = 14  # processes that compile

Attention = tuple[int, paged_attention.Tiles]  # query heads of a KV head, and tiles


def attention_candidates(scale: Scale) -> Iterator[Attention]:
    """What ships comes first, of each group."""
    for group in scale.groups:
        ships = paged_attention.choose_tiles(scale.head_dim, group, _dtype(scale))
        yield group, ships
        if not scale.on_gpu:
            yield group, replace(ships, block_n=16, split_len=16)
            continue
        rows = sorted({32, ships.block_m})
        for block_m, block_n, warps, stages in itertools.product(rows, (32, 64, 128), (2, 4, 8), (2, 3, 4)):
            fits = 4 * block_n * scale.head_dim * stages < SHARED_BYTES and block_m * scale.head_dim <= 2048 * warps
            for split_len in (256, 512, 1024) if fits else ():
                yield group, paged_attention.Tiles(block_m, block_n, split_len, warps, stages)


def linear_candidates(scale: Scale, shape: tuple[int, int]) -> Iterator[linear.Tiles]:
    """What ships comes first."""
    ships = linear.choose_tiles(1, *shape, _dtype(scale))
    yield ships
    for block_n, block_k, stages, splits in itertools.product((32, 64, 128), (64, 128), (3, 4, 6), (1, 2, 3, 4, 6, 8)):
        if scale.on_gpu and 2 * (ships.block_m + block_n) * block_k * stages < SHARED_BYTES:
            split_len = math.ceil(shape[1] / splits / block_k) * block_k
            yield linear.Tiles(ships.block_m, block_n, block_k, split_len, ships.num_warps, stages)


def run(scale: Scale, timer: Timer | None) -> dict[str, list[dict[str, Any]]]:
    """Of each candidate its tiles and microseconds by shape; of a group or a weight the quickest on average first."""
    if scale.on_gpu:
        compile_all(scale)
    return {"attention": list(_attention(scale, timer)), "linear": list(_linear(scale, timer))}


def compile_all(scale: Scale) -> None:
    """Each candidate once, by several processes: they leave what they compile to each other and to this one on disk."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_compile, args=(scale, job)) for job in range(JOBS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def _compile(scale: Scale, job: int) -> None:
    of_group = {group: _pages(scale, SHAPES[0], group) for group in scale.groups}
    for group, tiles in itertools.islice(attention_candidates(scale), job, None, JOBS):
        _microseconds(None, attention_call(of_group[group], tiles))
    some = dict.fromkeys(replace(tiles, split_len=512) for tiles in linear_candidates(scale, (4096, 4096)))
    x, weight = (torch.zeros(rows, 1024, dtype=_dtype(scale), device=scale.device) for rows in (1, 256))
    for tiles in itertools.islice(some, job, None, JOBS):
        _microseconds(None, lambda tiles=tiles: linear.linear(x, weight, tiles=tiles))


def attention_call(pages: Pages, tiles: paged_attention.Tiles) -> Callable[[], Tensor]:
    """Attention on these pages, with tiles of ours."""
    group = pages.query.shape[1] // pages.kv_pool.shape[2]
    bounds, contexts = pages.cu_query_lens.cpu(), pages.context_lens.cpu()
    items = work_list_ref(bounds, contexts, tiles.tokens(group), tiles.split_len)
    items = WorkList(*(x.to(pages.query.device) for x in (items.item_seq, items.cu_items)))
    arguments, output = replace(pages, work_list=items).arguments, torch.empty_like(pages.query)
    return lambda: paged_attention.paged_attention(*arguments, output=output, tiles=tiles)


def _attention(scale: Scale, timer: Timer | None) -> Iterable[dict[str, Any]]:
    shapes = SHAPES if scale.on_gpu else SMOKE_SHAPES
    for group in scale.groups:
        candidates = dict.fromkeys(tiles for of_group, tiles in attention_candidates(scale) if of_group == group)
        entries = [{"group": group, "tiles": asdict(tiles), "us": {}} for tiles in candidates]
        for shape in shapes:
            pages = _pages(scale, shape, group)
            for tiles, entry in zip(candidates, entries, strict=True):
                entry["us"][str(shape)] = _microseconds(timer, attention_call(pages, tiles))
        yield from _ordered(entries)


def _linear(scale: Scale, timer: Timer | None) -> Iterable[dict[str, Any]]:
    for name, (n, k, _) in scale.linear_shapes.items():
        weight = torch.randn(n, k, dtype=_dtype(scale), device=scale.device) / k**0.5
        inputs = {rows: torch.randn(rows, k, dtype=weight.dtype, device=scale.device) for rows in ROWS}
        yield from _ordered(
            {
                "weight": name,
                "tiles": asdict(tiles),
                "us": {
                    str(rows): _microseconds(timer, lambda x=x, t=tiles, w=weight: linear.linear(x, w, tiles=t))
                    for rows, x in inputs.items()
                },
            }
            for tiles in dict.fromkeys(linear_candidates(scale, (n, k)))
        )


def _ordered(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """By the mean of what each takes over what the quickest takes of the shape; what cannot run is left out."""
    first, *others = entries
    entries = [first | {"ships": True}, *others]
    able = [entry for entry in entries if all(seconds is not None for seconds in entry["us"].values())]
    least = {shape: min(entry["us"][shape] for entry in able) for shape in first["us"]}
    for entry in able:
        entry["over_least"] = sum(entry["us"][shape] / least[shape] for shape in least) / len(least)
    return sorted(able, key=lambda entry: entry["over_least"])


def _microseconds(timer: Timer | None, call: Callable[[], object]) -> float | None:
    """None where the device has not what it takes; 1 where nobody times."""
    try:
        if timer is None:
            call()
            return 1.0
        return 1e6 * timer(call).median
    except Exception as error:
        if type(error).__name__ == "OutOfResources":
            return None
        raise


def _dtype(scale: Scale) -> torch.dtype:
    return torch.bfloat16 if scale.on_gpu else scale.dtypes[0]


def _pages(scale: Scale, shape: tuple[int, int, int], group: int) -> Pages:
    batch_size, context_len, query_len = shape
    return make_pages(
        [query_len] * batch_size, [context_len] * batch_size, num_kv_heads=scale.num_kv_heads, group=group,
        head_dim=scale.head_dim, block_size=scale.block_size, dtype=_dtype(scale), device=scale.device,
    )  # fmt: skip
