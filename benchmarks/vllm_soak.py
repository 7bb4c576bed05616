"""`python -m benchmarks.vllm_soak`: whether the worker loses, mixes up, leaks or grows over a thousand requests.

Random prompts, lengths, sampling and numbers of drafts through vLLM's engine in this process, over so few blocks that
requests are preempted, with aborts at any moment. What comes out is compared with the project's own engine, one line of
requests after the other. Ends in one line of JSON, and exit status 1 where something is wrong.
"""

from __future__ import annotations

import json
import os
import random
from typing import Any

import typer
from tqdm import tqdm

from benchmarks.soak import resident_bytes

NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN, MAX_OUTPUT = 64, 16, 384, 96
AT_ONCE = 24  # requests that vLLM knows, more than it can run
ABORTED = 0.1


def random_requests(count: int, seed: int, prompts: list[list[int]], vocab_size: int) -> list[dict[str, Any]]:
    """Prompts and parameters, as both engines spell them; some with a moment to abort them at."""
    rng = random.Random(seed)
    requests = []
    for _ in range(count):
        prompt = rng.choice(prompts)
        start = rng.randrange(len(prompt))
        prompt = (prompt[start:] + prompt[:start])[: rng.randint(1, MAX_MODEL_LEN - MAX_OUTPUT - 1)]
        params: dict[str, Any] = {"temperature": 0.0, "max_tokens": rng.randint(1, MAX_OUTPUT)}
        if rng.random() < 0.5:
            params |= {"temperature": rng.choice((0.5, 0.9, 1.2)), "seed": rng.randrange(2**32)}
            params |= rng.choice(({}, {"top_p": 0.9}, {"top_k": 20}, {"repetition_penalty": 1.3}))
        if rng.random() < 0.5:
            params["ignore_eos"] = True
        if rng.random() < 0.2:
            params["stop_token_ids"] = [rng.randrange(vocab_size)]
        if rng.random() < 0.2:
            params["extra_args"] = {"num_speculative_tokens": rng.randint(0, 4)}
        # The engine's step, counted from the request's arrival: it may wait, be prefilled, decode or be preempted.
        abort_after = rng.randint(0, 60) if rng.random() < ABORTED else None
        requests.append({"prompt": prompt, "params": params, "abort_after": abort_after})
    return requests


def run_vllm(requests: list[dict[str, Any]], k: int, progress: Any) -> dict[str, Any]:
    """All requests through vLLM: their tokens (None where aborted), preemptions, memory, and what is held behind."""
    from vllm import LLM, SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler

    from specpaged.config import EMBEDDED_DRAFT, EMBEDDED_TARGET
    from specpaged.vllm_plugin import WORKER_CLS

    llm = LLM(
        EMBEDDED_TARGET,
        worker_cls=WORKER_CLS,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=12,
        max_num_batched_tokens=256,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=NUM_BLOCKS,
        kv_cache_memory_bytes=64 << 20,
        enforce_eager=True,
        speculative_config={"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": k},
    )
    engine, core = llm.llm_engine, llm.llm_engine.engine_core.engine_core
    preemptions, preempt = [], Scheduler._preempt_request

    def counting(self: Scheduler, *arguments: Any, **options: Any) -> Any:
        preemptions.append(1)
        return preempt(self, *arguments, **options)

    Scheduler._preempt_request = counting
    outputs: dict[int, list[int] | None] = {}
    added, step, rss = 0, 0, []
    aborts: dict[int, list[int]] = {}  # by step
    try:
        while added < len(requests) or engine.has_unfinished_requests():
            while added < len(requests) and added - len(outputs) < AT_ONCE:
                request = requests[added]
                engine.add_request(
                    str(added), {"prompt_token_ids": request["prompt"]}, SamplingParams(**request["params"])
                )
                if request["abort_after"] is not None:
                    aborts.setdefault(step + request["abort_after"], []).append(added)
                added += 1
            ended = [(int(output.request_id), output) for output in engine.step() if output.finished]
            for i, output in ended:
                outputs[i] = list(output.outputs[0].token_ids)
            for i in aborts.pop(step, ()):
                if i not in outputs:
                    engine.abort_request([str(i)])
                    outputs[i] = None
                    ended.append((i, None))
            rss += [resident_bytes()] * len(ended)
            progress(len(ended))
            step += 1
        llm.generate({"prompt_token_ids": [1]}, SamplingParams(max_tokens=1), use_tqdm=False)  # the worker forgets
    finally:
        Scheduler._preempt_request = preempt
    runner = core.model_executor.driver_worker.worker.model_runner
    runner.check_integrity()
    core.scheduler.reset_prefix_cache()
    pool = core.scheduler.kv_cache_manager.block_pool
    return {
        "outputs": outputs,
        "preemptions": len(preemptions),
        "held_blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        "remembered": max(0, len(runner.sequences) - 1),
        "growth": rss[-1] / rss[len(rss) // 10] - 1,
        "acceptance": runner.metrics.acceptance_rate,
    }


def expected_outputs(requests: list[dict[str, Any]]) -> list[list[int]]:
    """Of the project's own engine, without drafts."""
    from specpaged import LLM, SamplingParams

    llm = LLM(speculative_config={"num_speculative_tokens": 0}, max_model_len=MAX_MODEL_LEN, max_num_seqs=16)
    params = [
        SamplingParams(**{name: value for name, value in request["params"].items() if name != "extra_args"})
        for request in requests
    ]
    prompts = [{"prompt_token_ids": request["prompt"]} for request in requests]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def soak(num_requests: int, k: int, seed: int, progress: Any = lambda count: None) -> dict[str, Any]:
    """Counts of what went wrong, and what was seen on the way."""
    from specpaged.config import EMBEDDED_TARGET
    from specpaged.modeling.loading import load_tokenizer
    from specpaged.prompts import load_prompts

    tokenizer = load_tokenizer(EMBEDDED_TARGET)
    prompts = [tokenizer.encode(record.text) for record in load_prompts(None)]
    requests = random_requests(num_requests, seed, prompts, len(tokenizer))
    found = run_vllm(requests, k, progress)
    expected = expected_outputs(requests)
    outputs = found.pop("outputs")
    compared = [(got, expected[i]) for i, got in outputs.items() if got is not None]
    return {
        "requests": num_requests,
        "aborted": len(outputs) - len(compared),
        "lost": num_requests - len(outputs),
        "mismatches": sum(got != list(wanted) for got, wanted in compared),
        **found,
    }


def main(
    requests: int = typer.Option(1000, min=20, help="Requests in all."),
    num_speculative_tokens: int = typer.Option(4, min=1, help="Draft tokens per round."),
    seed: int = typer.Option(0, help="Of everything."),
) -> None:
    """Run REQUESTS requests."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    with tqdm(total=requests, unit="request") as bar:
        found = soak(requests, num_speculative_tokens, seed, bar.update)
    from benchmarks.environment import environment

    print(json.dumps(environment(int(os.environ["OMP_NUM_THREADS"])) | found))
    wrong = found["lost"] or found["mismatches"] or found["held_blocks"] or found["remembered"]
    raise typer.Exit(1 if wrong or not found["preemptions"] or found["growth"] > 0.02 else 0)


if __name__ == "__main__":
    typer.run(main)
