"""`specpaged plan`: what fits into a budget of memory, with and without drafting, and how to ask for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

import specpaged.cli.options as options
from specpaged.cli.plan_output import draw, print_ways
from specpaged.cli.printing import checked, console
from specpaged.planning.commands import engine_command, vllm_command
from specpaged.planning.request import PlanRequest
from specpaged.studies.environment import environment


def plan(
    memory: Annotated[str, typer.Option(help="Bytes for weights, KV and buffers: 6GiB, 800MB, 8589934592.")],
    model: options.Model = None,
    draft_model: options.DraftModel = None,
    context: Annotated[int, typer.Option(min=2, help="Tokens of a sequence, prompt and output.")] = 4096,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences at once, at most. Default: what fits.")] = None,
    draft_kv_window: Annotated[
        int | None, typer.Option(help="Of the layout in which the draft reads a window. Default: 512, if that is less.")
    ] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Default: 16 on a CPU, 64 on a GPU.")] = None,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Rows of a pass at most.")] = 2048,
    max_num_speculative_tokens: Annotated[int, typer.Option(min=1, help="The largest K.")] = 8,
    acceptance: Annotated[float, typer.Option(help="Of each draft, where nothing has been measured.")] = 0.7,
    measured: Annotated[Path | None, typer.Option(help="The tune.json of `specpaged tune --out DIR`.")] = None,
    gigabytes_per_second: Annotated[float | None, typer.Option(help="That memory is read with, if known.")] = None,
    gigaflops: Annotated[float | None, typer.Option(help="That are computed in a second, if known.")] = None,
    dtype: options.DType = "auto",
    kv_cache_dtype: options.KVCacheDType = "auto",
    draft_kv_cache_dtype: options.DraftKVCacheDType = "auto",
    device: options.Device = "cpu",
    numerics: options.Numerics = "exact",
    threads: options.Threads = None,
    out: Annotated[Path | None, typer.Option(help="Folder for plan.json and plan.png.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Plan speculation within a budget of memory: the largest batch, K, KV's precision and layout, and where drafts are
    worth the memory that they hold.

    Reads config.json and the headers of safetensors files, and loads nothing.
    """
    arguments: dict[str, Any] = {k: v for k, v in locals().items() if k not in ("out", "as_json")}
    request = checked(PlanRequest.of, **arguments)
    planner, budget = request.planner, request.memory
    ways = planner.ways(budget)
    print_ways(request, ways)
    plain = max((way for way in ways if way.num_drafts == 0), key=lambda way: way.tokens_per_second)
    best = max(ways, key=lambda way: way.tokens_per_second)
    figures: dict[str, Any] = request.as_dict() | {"ways": [way.as_dict(planner.context) for way in ways]}
    if best.batch == 0:
        least = min(model.num_bytes(1, planner.context) for model in planner.plain.values())
        figures["least_memory"] = least
        console.print(f"nothing fits: one sequence of {planner.context} tokens takes {least} bytes", highlight=False)
    else:
        bound = planner.bound(budget) if planner.drafting else None
        figures |= {"best": best.name, "speed_over_plain": round(best.tokens_per_second / plain.tokens_per_second, 3)}
        figures |= {"speculation_pays_from": bound}
        console.print(request.verdict(plain, best, bound), highlight=False, markup=False)
        commands = {"engine": engine_command(request, best), "vllm": vllm_command(request, ways)}
        figures["commands"] = commands
        for command in commands.values():
            console.print(command, highlight=False, markup=False, soft_wrap=True)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "plan.json").write_text(json.dumps(figures, indent=1) + "\n")
        console.print(draw(request, out / "plan.png"))
    if as_json:
        print(json.dumps(environment(threads or 1) | figures))
    raise typer.Exit(0 if best.batch else 1)
