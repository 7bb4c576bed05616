"""A plan as command lines: of our engine, and of vLLM with our worker."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from specpaged.planning.way import Way

if TYPE_CHECKING:
    from specpaged.planning.request import PlanRequest

WORKER = "specpaged.vllm_plugin.worker.SpecPagedWorker"


def engine_command(request: PlanRequest, way: Way) -> str:
    """`specpaged generate`, of a way that fits."""
    said, planner = request.options, request.planner
    kv, own = way.memory.kv_bytes(way.batch, planner.context - way.num_drafts, way.num_drafts)
    words = ["specpaged", "generate"]
    if said["model"] is not None:
        words += ["--model", said["model"]]
    if way.num_drafts == 0:
        words += ["--num-speculative-tokens", "0"]
    elif said["model"] is not None:
        words += ["--draft-model", said["draft_model"]]
    words += ["--max-model-len", planner.context, "--max-num-seqs", way.batch, "--kv-cache-memory-bytes", kv]
    words += ["--block-size", way.memory.block_size]
    words += _unless(2048, "--max-num-batched-tokens", max(way.batch, way.memory.max_num_batched_tokens))
    words += _unless("auto", "--dtype", said["dtype"]) + _unless("exact", "--numerics", said["numerics"])
    if way.memory.target.kv_dtype != way.memory.target.dtype:
        words += ["--kv-cache-dtype", way.memory.target.kv_dtype]
    if way.num_drafts:
        draft = way.memory.draft
        words += _unless(draft.dtype, "--draft-kv-cache-dtype", draft.kv_dtype)
        words += _unless(None, "--draft-kv-window", way.memory.window)
        words += _unless(0, "--draft-kv-cache-memory-bytes", own)
    words += _unless("cpu", "--device", request.device) + _unless(None, "--threads", said["threads"])
    return shlex.join(map(str, words))


def vllm_command(request: PlanRequest, ways: Sequence[Way]) -> str:
    """vLLM's server with our worker: of the best way in which one block serves both pools, which are vLLM's own."""
    shared = [way for way in ways if way.batch and (way.num_drafts == 0 or way.memory.shares_blocks)]
    way = max(shared, key=lambda way: way.tokens_per_second)
    said, planner, target = request.options, request.planner, way.memory.target
    kv, _ = way.memory.kv_bytes(way.batch, planner.context - way.num_drafts, way.num_drafts)
    words = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", said["model"] or request.target.name]
    words += ["--worker-cls", WORKER, "--dtype", target.dtype, "--max-model-len", planner.context]
    words += ["--max-num-seqs", way.batch, "--kv-cache-memory-bytes", kv, "--block-size", way.memory.block_size]
    words += ["--max-num-batched-tokens", max(way.batch, way.memory.max_num_batched_tokens)]
    own = {}
    if target.kv_dtype != target.dtype:
        own["kv_cache_dtype"] = target.kv_dtype
    if way.num_drafts:
        draft = way.memory.draft
        if draft.kv_dtype != draft.dtype:
            own["draft_kv_cache_dtype"] = draft.kv_dtype
        name = said["draft_model"]
        config = {"method": "draft_model", "model": name, "num_speculative_tokens": way.num_drafts}
        words += ["--speculative-config", json.dumps(config)]
    if said["numerics"] != "exact":
        own["numerics"] = said["numerics"]
    if own:
        words += ["--additional-config", json.dumps({"specpaged": own})]
    return shlex.join(map(str, words))


def _unless(default: object, flag: str, value: object) -> list[object]:
    return [] if value == default else [flag, value]
