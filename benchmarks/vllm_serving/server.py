"""One contender: a vLLM that serves as it is asked to, and says when each token came."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

MAX_MODEL_LEN = 512
KV_BYTES = 512 << 20
_STRIDE = 37  # between the lengths of neighbouring outputs


def num_prompts(level: int) -> int:
    """Of a turn with so many requests at once: enough that most of it is at full concurrency."""
    return max(64, 4 * level)


def engine_arguments(contender: str, job: dict[str, Any]) -> dict[str, Any]:
    """Of vLLM, for one contender."""
    from specpaged.vllm_plugin import WORKER_CLS

    worker, method, *fixed = contender.split()
    num_speculative_tokens = (int(fixed[0]) if fixed else 0) or job["num_speculative_tokens"]
    arguments: dict[str, Any] = {
        "model": job["target"],
        "skip_tokenizer_init": job["prompts"] is not None,
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": max(job["concurrency"]),
        "kv_cache_memory_bytes": KV_BYTES,
        "enable_prefix_caching": False,
    }
    if worker == "ours":
        arguments["worker_cls"] = WORKER_CLS
    if method == "draft_model":
        arguments["speculative_config"] = {
            "method": method, "model": job["speculative"]["model"], "num_speculative_tokens": num_speculative_tokens
        }  # fmt: skip
        if fixed:
            arguments["additional_config"] = {"specpaged": {"adaptive": False}}
    elif method == "suffix":
        own = {"method": method, "num_speculative_tokens": num_speculative_tokens}
        arguments["speculative_config"] = job["speculative"] | own
    elif method == "ngram":
        arguments["speculative_config"] = {
            "method": method, "num_speculative_tokens": num_speculative_tokens, "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
        }  # fmt: skip
    return arguments


async def serve(job: dict[str, Any]) -> None:
    """For each line of the input, a level of concurrency, a line of when its requests came and got what.

    Times are of the machine's monotonic clock, which all processes share.
    """
    from prometheus_client import CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.reader import get_metrics_snapshot

    from specpaged.prompts import load_prompts

    if job["prompts"] is None:
        prompts = [record.text for record in load_prompts(None)]
    else:
        prompts = [{"prompt_token_ids": token_ids} for token_ids in job["prompts"]]
    prompts = [prompts[i % len(prompts)] for i in range(job["num_prompts"])]
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(job["contender"], job)))

    def params_of(i: int) -> SamplingParams:
        # Outputs of one length would make plain decoding, and it alone, prefill all prompts of a batch in one pass.
        return SamplingParams(
            temperature=0,
            max_tokens=job["max_tokens"] // 2 + i * _STRIDE % job["max_tokens"],
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"num_speculative_tokens": 0} if job["contender"].endswith(" 0") else None,
            detokenize=job["prompts"] is None,
        )

    async def complete(i: int, prompt: str, room: asyncio.Semaphore) -> dict[str, Any]:
        async with room:
            output = {"came": time.monotonic(), "times": [], "chunks": []}
            async for delta in engine.generate(prompt, params_of(i), f"{time.monotonic()}-{i}"):
                token_ids = list(delta.outputs[0].token_ids)
                if token_ids:
                    output["times"].append(time.monotonic())
                    output["chunks"].append(token_ids)
            return output

    def counters() -> tuple[float, float, float]:
        values = {metric.name: metric.value for metric in get_metrics_snapshot() if hasattr(metric, "value")}
        names = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # the worker's, which is another process
        seconds = sum(
            sample.value
            for metric in registry.collect()
            for sample in metric.samples
            if sample.name == "specpaged:stage_seconds_total"
        )
        return (*(values.get(name, 0) for name in names), seconds)

    async def complete_all(level: int) -> dict[str, Any]:
        room = asyncio.Semaphore(level)
        before, began = counters(), time.monotonic()
        of_level = enumerate(prompts[: num_prompts(level)])
        outputs = await asyncio.gather(*(complete(i, prompt, room) for i, prompt in of_level))
        ended = time.monotonic()
        drafted, accepted, stage_seconds = (b - a for a, b in zip(before, counters(), strict=True))
        return {
            "began": began,
            "ended": ended,
            "outputs": outputs,
            "drafted": drafted,
            "accepted": accepted,
            "stage_seconds": stage_seconds,
        }

    while line := await asyncio.to_thread(sys.stdin.readline):
        tell(await complete_all(int(line)))
    engine.shutdown()


def tell(answer: dict[str, Any]) -> None:
    """A line of it, whole, on the standard output: of what an unbuffered one (`python -u`) writes, a stop of the
    process in between cuts off the rest.
    """
    with open(sys.stdout.fileno(), "w", closefd=False) as buffered:
        print(json.dumps(answer), file=buffered)
