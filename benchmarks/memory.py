"""`python -m benchmarks.memory K`: the peak of resident memory beside its floor, in a process of its own; JSON."""

from __future__ import annotations

import json
import resource
import sys

import torch

from benchmarks.contenders import sample_prompts
from specpaged import LLM, SamplingParams

KV_BYTES = 64 << 20
BATCH_SIZE = 32


def peak_bytes() -> int:
    """Of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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
    prompts = [{"prompt_token_ids": token_ids} for token_ids in sample_prompts(2 * BATCH_SIZE)]
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True), use_tqdm=False)
    floor = sum(runner.model.weight_bytes + runner.kv_cache.num_bytes for runner in runners)
    peak = peak_bytes()
    print(json.dumps({"imports": imports, "floor": floor, "peak": peak, "rest": peak - imports - floor}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
