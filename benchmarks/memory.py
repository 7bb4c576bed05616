"""`python -m benchmarks.memory K`: the peak of resident memory beside its floor, in a process of its own; JSON.

And beside what a plan says of it: its `planned` bytes are those of the engine, `share` what was measured over that.
"""

from __future__ import annotations

import json
import resource
import sys

import torch

from benchmarks.contenders import sample_prompts
from specpaged import LLM, SamplingParams
from specpaged.config import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specpaged.planning.checkpoint_tensors import CheckpointTensors
from specpaged.planning.memory_model import MemoryModel
from specpaged.planning.model_memory import ModelMemory

KV_BYTES = 64 << 20
BATCH_SIZE = 32


def peak_bytes() -> int:
    """Of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident_bytes() -> int:
    """Of this process now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def main(k: int) -> None:
    """Load, make every page of the pools resident, decode two full batches."""
    torch.set_num_threads(1)
    torch.ones(8, 8) @ torch.ones(8, 8)
    imports = peak_bytes()
    llm = LLM(
        speculative_config={"num_speculative_tokens": k},
        dtype="float32",
        max_model_len=512,
        max_num_seqs=BATCH_SIZE,
        kv_cache_memory_bytes=KV_BYTES,
    )
    runners = [runner for runner in (llm.engine.target, llm.engine.draft) if runner is not None]
    for runner in runners:
        for layer in runner.kv_cache.layers:
            layer.zero_()
    loaded = resident_bytes()
    prompts = [{"prompt_token_ids": token_ids} for token_ids in sample_prompts(2 * BATCH_SIZE)]
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True), use_tqdm=False)
    floor = sum(runner.model.weight_bytes + runner.kv_cache.num_bytes for runner in runners)
    peak = peak_bytes()
    planned = planned_bytes(k, sum(map(len, (prompt["prompt_token_ids"] for prompt in prompts[:BATCH_SIZE]))))
    measured = peak - imports
    figures = {"imports": imports, "floor": floor, "peak": peak, "rest": measured - floor}
    figures |= {"beside_floor_when_loaded": loaded - imports - floor, "buffers": peak - loaded}
    figures |= {"planned_buffers": planned - floor}
    print(json.dumps(figures | {"planned": planned, "share": round(measured / planned, 4)}))


def planned_bytes(k: int, num_prompt_tokens: int) -> int:
    """What a plan says of such an engine: weights, pools and the buffers of its largest pass."""
    paths = (EMBEDDED_TARGET, EMBEDDED_DRAFT)[: 1 + (k > 0)]
    models = [
        ModelMemory.of(CheckpointTensors.read(path), max_model_len=512, is_fast=i > 0) for i, path in enumerate(paths)
    ]
    model = MemoryModel(*models, max_num_batched_tokens=min(2048, num_prompt_tokens))
    return model.weight_bytes + model.null_blocks + KV_BYTES + model.workspace(BATCH_SIZE, k)


if __name__ == "__main__":
    main(int(sys.argv[1]))
