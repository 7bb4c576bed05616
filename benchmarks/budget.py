"""`python -m benchmarks.budget`: speculation with less memory beside speculation as it comes, and beside plain decoding
under the same memory when there is little; the embedded pair, in turns; ends in JSON.

Generation memory is the blocks of both pools that were held at the peak, and a plan's buffers of the largest pass.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import Any

import torch

from benchmarks.contenders import sample_prompts
from specpaged import LLM, SamplingParams
from specpaged.config import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specpaged.planning.checkpoint_tensors import CheckpointTensors
from specpaged.planning.memory_model import MemoryModel
from specpaged.planning.model_memory import ModelMemory
from specpaged.studies.environment import environment

MAX_MODEL_LEN = 1024
NARROW = {"kv_cache_dtype": "bfloat16"}
LITTLE = 12 << 20  # bytes of KV: some sequences at once, of those that would run


def contenders(batch_size: int) -> dict[str, dict[str, Any]]:
    """What LLM is given, by name: the first three with all the memory that they want, the others with little."""
    small = {"max_num_batched_tokens": 256, **NARROW}
    windowed = {**NARROW, "kv_window": 256}
    plain = {"num_speculative_tokens": 0}
    engines = {
        "as it comes": {"speculative_config": {}},
        "16-bit KV": {"speculative_config": NARROW, **NARROW},
        "16-bit KV, window, small passes": {"speculative_config": windowed, **small},
        "little memory, plain": {"speculative_config": plain, "kv_cache_memory_bytes": LITTLE},
        "little memory, drafting": {"speculative_config": {}, "kv_cache_memory_bytes": LITTLE},
        "little memory, window": {"speculative_config": {"kv_window": 256}, "kv_cache_memory_bytes": LITTLE},
    }
    return {
        name: {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": batch_size, "dtype": "float32", **arguments}
        for name, arguments in engines.items()
    }


def buffers(llm: LLM) -> int:
    """A plan's, of the engine's largest pass."""
    paths = (EMBEDDED_TARGET, EMBEDDED_DRAFT)
    models = [ModelMemory.of(CheckpointTensors.read(path)) for path in paths[: llm.engine.num_pools]]
    config = llm.config
    model = MemoryModel(*models, max_num_batched_tokens=config.max_num_batched_tokens)
    return model.workspace(config.max_num_seqs, llm.engine.max_draft_tokens)


def main() -> None:
    """Run all of them by turns, and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    llms = {name: LLM(**arguments) for name, arguments in contenders(options.batch_size).items()}
    prompts = [{"prompt_token_ids": ids} for ids in sample_prompts(options.num_prompts)]
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens, ignore_eos=True)
    speeds: dict[str, list[float]] = {name: [] for name in llms}
    outputs: dict[str, list[list[int]]] = {}
    for turn in range(1 + options.rounds):
        for name, llm in llms.items():
            start = time.perf_counter()
            done = llm.generate(prompts, params, use_tqdm=False)
            if turn:
                speeds[name].append(options.num_prompts * options.max_tokens / (time.perf_counter() - start))
            outputs[name] = [output.outputs[0].token_ids for output in done]
    figures: dict[str, Any] = {}
    for name, llm in llms.items():
        runners = [runner for runner in (llm.engine.target, llm.engine.draft) if runner is not None]
        metrics = llm.metrics
        held = [metrics.peak_blocks_in_use, metrics.peak_draft_blocks_in_use or metrics.peak_blocks_in_use]
        block = [runner.kv_cache.block_size * runner.kv_cache.bytes_per_token for runner in runners]
        kv = sum(blocks * size for blocks, size in zip(held, block, strict=False))
        figures[name] = {
            "tokens_per_second": round(median(speeds[name]), 1),
            "of_turns": [round(speed, 1) for speed in speeds[name]],
            "kv_bytes": kv,
            "buffers": buffers(llm),
            "generation_bytes": kv + buffers(llm),
            "acceptance_rate": metrics.acceptance_rate,
            "preemptions": metrics.preemptions,
            "short_steps": metrics.short_steps,
            "released_draft_tokens": metrics.released_draft_tokens,
            "requests_without_draft_kv": metrics.requests_without_draft_kv,
        }
        print(f"{name:<32}", figures[name])
    wide = [name for name in llms if "16-bit" not in name]
    figures["identical"] = all(outputs[name] == outputs[wide[0]] for name in wide)  # of KV in float32
    print(json.dumps(environment(1) | figures))


if __name__ == "__main__":
    main()
