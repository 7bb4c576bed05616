"""`python -m benchmarks.soak`: whether an engine slows down, grows or leaks over thousands of requests.

Requests of mixed lengths keep the batch full until the last that counts has ended; the rest is drained. Speed is taken
per hundred finished requests; memory is compared from a tenth of the run on, when all has been touched once. Ends in
one line of JSON.
"""

from __future__ import annotations

import json
import os
import random
import time
from itertools import pairwise
from pathlib import Path

import typer
from tqdm import tqdm

WINDOW = 100  # finished requests
MAX_OUTPUT = 96


def resident_bytes() -> int:
    """Of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main(
    requests: int = typer.Option(2000, min=3 * WINDOW, help="Requests that count."),
    max_num_seqs: int = typer.Option(64, min=1, help="Sequences in a batch."),
    num_speculative_tokens: int = typer.Option(2, min=0, help="Draft tokens per round."),
    threads: int = typer.Option(1, min=1, help="CPU threads of a pass."),
    seed: int = typer.Option(0, help="Of lengths and prompts."),
) -> None:
    """Run REQUESTS requests through one engine."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    import torch

    from benchmarks.contenders import sample_prompts
    from benchmarks.environment import environment
    from specpaged import LLM, SamplingParams

    torch.set_num_threads(threads)
    rng = random.Random(seed)
    prompts = sample_prompts(64)
    llm = LLM(
        speculative_config={"num_speculative_tokens": num_speculative_tokens},
        max_model_len=512,
        max_num_seqs=max_num_seqs,
    )
    engine = llm.engine
    added, finished = 0, 0
    # What was emitted, and when, and how large the process was, as each window of requests ended.
    marks = [(0, time.perf_counter(), resident_bytes())]
    with tqdm(total=requests, unit="request") as bar:
        while finished < requests:
            while len(engine.requests) < max_num_seqs:
                prompt = rng.choice(prompts)
                params = SamplingParams(
                    temperature=rng.choice((0.0, 0.8)),
                    max_tokens=rng.randint(1, MAX_OUTPUT),
                    ignore_eos=True,
                    detokenize=False,
                )
                engine.add_request(str(added), prompt[: rng.randint(1, len(prompt))], params)
                added += 1
            done = len(engine.step())
            bar.update(done)
            if (finished + done) // WINDOW > finished // WINDOW:
                marks.append((engine.metrics.emitted_tokens, time.perf_counter(), resident_bytes()))
            finished += done
    while engine.has_unfinished_requests:
        engine.step()
    engine.check_integrity()
    speeds = [(b[0] - a[0]) / (b[1] - a[1]) for a, b in pairwise(marks)]
    settled = marks[max(1, requests // 10 // WINDOW)][2]
    results = environment(threads) | {
        "requests": requests,
        "max_num_seqs": max_num_seqs,
        "num_speculative_tokens": num_speculative_tokens,
        "emitted_tokens": engine.metrics.emitted_tokens,
        "preemptions": engine.metrics.preemptions,
        "tokens_per_second": [round(speed, 1) for speed in speeds],
        "last_over_first": round(speeds[-1] / speeds[0], 3),
        "resident_mib": [round(size / 2**20, 1) for _, _, size in marks],
        "growth_after_a_tenth": round(marks[-1][2] / settled - 1, 4),
        "blocks_held": engine.allocator.num_held,
    }
    print(
        f"{requests} requests, {results['emitted_tokens']} tokens: the last {WINDOW} ran at "
        f"{results['last_over_first']:.2f} of the first {WINDOW}'s tokens/s ({speeds[0]:.0f} -> {speeds[-1]:.0f}), "
        f"memory grew by {results['growth_after_a_tenth']:.2%} after a tenth, {results['blocks_held']} blocks are held"
    )
    print(json.dumps(results))


if __name__ == "__main__":
    typer.run(main)
