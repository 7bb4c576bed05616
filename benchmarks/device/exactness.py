"""The promise, on the device: the same bits for a row in every pass, the same tokens with and without speculation."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.device.pages import make_pages
from benchmarks.device.scale import Scale
from specpaged import LLM, SamplingParams
from specpaged.prompts import evenly_spread, load_prompts
from specpaged_kernels.linear import linear
from specpaged_kernels.paged_attention import choose_tiles, paged_attention, work_list_ref
from specpaged_kernels.rms_norm import rms_norm


def run(scale: Scale) -> dict[str, Any]:
    """True where every comparison is bitwise equal."""
    results: dict[str, Any] = {}
    for dtype in scale.dtypes:
        name = str(dtype).removeprefix("torch.")
        results[name] = {
            "attention": all(_attention_rows(scale, dtype, group) for group in scale.groups),
            "linear": _linear_rows(scale, dtype),
            "rms_norm": _norm_rows(scale, dtype),
        }
    return results


def _attention_rows(scale: Scale, dtype: torch.dtype, group: int) -> bool:
    """A prefill of many tokens, verifies of 6, and single tokens, of one sequence among others and in other pages."""
    tokens = 40 if scale.on_gpu else 20
    context = scale.context_lens[0] + 3
    pages = make_pages(
        [3, tokens], [17, context], num_kv_heads=scale.num_kv_heads, group=group, head_dim=scale.head_dim,
        block_size=scale.block_size, dtype=dtype, device=scale.device,
    )  # fmt: skip
    together = paged_attention(*pages.arguments)[3:]
    tiles = choose_tiles(scale.head_dim, group, dtype)
    blocks = pages.kv_pool.view(-1, scale.block_size, *pages.kv_pool.shape[1:])
    moved = torch.randperm(len(blocks), device=scale.device)  # block b goes to moved[b]
    pool = torch.empty_like(blocks)
    pool[moved] = blocks
    table = moved[pages.page_table[1:2].long()].to(torch.int32)
    for start, stop in [(0, 6), (7, 13), (tokens - 6, tokens), *((t, t + 1) for t in range(0, tokens, 7))]:
        bounds = torch.tensor([0, stop - start], dtype=torch.int32)
        contexts = torch.tensor([context + start], dtype=torch.int32)
        work_list = work_list_ref(bounds, contexts, tiles.tokens(group), tiles.split_len)
        work_list = type(work_list)(work_list.item_seq.to(scale.device), work_list.cu_items.to(scale.device))
        alone = paged_attention(
            pages.query[3 + start : 3 + stop], pool.flatten(0, 1), table, bounds.to(scale.device),
            contexts.to(scale.device), pages.block_size, work_list,
        )  # fmt: skip
        if not torch.equal(alone, together[start:stop]):
            return False
    return True


def _linear_rows(scale: Scale, dtype: torch.dtype) -> bool:
    many = 300 if scale.on_gpu else 3
    for n, k, _ in scale.linear_shapes.values():
        weight = torch.randn(min(n, 8192), k, dtype=dtype, device=scale.device) / k**0.5
        x = torch.randn(many, k, dtype=dtype, device=scale.device)
        together = linear(x, weight)
        for rows in scale.linear_rows:
            for start in {0, many - rows}:
                if not torch.equal(linear(x[start : start + rows], weight), together[start : start + rows]):
                    return False
    return True


def _norm_rows(scale: Scale, dtype: torch.dtype) -> bool:
    x = torch.randn(70, 128, dtype=dtype, device=scale.device)
    weight = torch.randn(128, dtype=dtype, device=scale.device)
    together = rms_norm(x, weight, 1e-6)
    return all(torch.equal(rms_norm(x[i : i + 1], weight, 1e-6), together[i : i + 1]) for i in range(0, 70, 9))


def end_to_end(scale: Scale) -> dict[str, Any]:
    """The embedded pair, plain one at a time and speculative in a batch, greedy and sampled, float32 and bfloat16."""
    prompts = [record.text for record in evenly_spread(load_prompts(None), scale.num_prompts)]
    results: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        for temperature in (0.0, 0.8):
            params = [SamplingParams(temperature=temperature, seed=i, max_tokens=64) for i in range(len(prompts))]
            outputs, speeds = {}, {}
            for name, k, batch_size in (("plain", 0, 1), ("speculative", 5, 16)):
                llm = LLM(
                    speculative_config={"num_speculative_tokens": k},
                    device=scale.device, dtype=dtype, attention_backend="triton", max_num_seqs=batch_size,
                    block_size=64, max_model_len=768,
                )  # fmt: skip
                llm.generate(prompts[:1], params[:1], use_tqdm=False)  # compiles
                start = time.perf_counter()
                completed = llm.generate(prompts, params, use_tqdm=False)
                seconds = time.perf_counter() - start
                outputs[name] = [output.outputs[0].token_ids for output in completed]
                speeds[name] = sum(map(len, outputs[name])) / seconds
            same = sum(a == b for a, b in zip(outputs["plain"], outputs["speculative"], strict=True))
            results[f"{dtype}, temperature {temperature}"] = {
                "identical": same, "prompts": len(prompts), "tokens_per_second": speeds,
                "acceptance_rate": llm.metrics.acceptance_rate,
            }  # fmt: skip
    return results
