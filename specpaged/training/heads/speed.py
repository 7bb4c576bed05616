"""How fast the engine decodes with heads: the held-out prompts, plainly and with every number of drafts, in turn."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import cycle, islice
from statistics import median
from typing import Any

from specpaged.llm import LLM
from specpaged.sampling_params import SamplingParams
from specpaged.training.heads.acceptance import NUM_DRAFTS

BATCH_SIZES = (1, 8)
MAX_TOKENS = 64
_WARM_UP_TOKENS = 8


def measure_speed(llm: LLM, prompts: Sequence[Sequence[int]], seconds: float) -> dict[str, Any]:
    """Greedy decoding by an engine whose requests may ask for up to NUM_DRAFTS drafts.

    A turn is a batch of prompts at each K from 0, which is plain decoding, to NUM_DRAFTS; as many turns as there are
    prompts, or as begin within `seconds`, but one at least. By batch size, {"1": ..., "8": ...}: how many `turns`, the
    median of `plain_tokens_per_second`, and `over_plain`, for K = 1, 2, ... the median of the speed over that of plain
    decoding in the same turn. Prompts are run within that time.
    """
    ks = range(NUM_DRAFTS + 1)
    for k in ks:
        _speed(llm, prompts[:1], k, _WARM_UP_TOKENS)
    speeds: dict[int, list[list[float]]] = {size: [] for size in BATCH_SIZES}
    end = time.monotonic() + seconds
    for i in range(len(prompts)):
        if i and time.monotonic() >= end:
            break
        for size in BATCH_SIZES:
            batch = list(islice(cycle(prompts), i, i + size))
            first = i % len(ks)
            of_k = {k: _speed(llm, batch, k, MAX_TOKENS) for k in (*ks[first:], *ks[:first])}
            speeds[size].append([of_k[k] for k in ks])
    return {
        str(size): {
            "turns": len(turns),
            "plain_tokens_per_second": round(median(turn[0] for turn in turns), 1),
            "over_plain": [round(median(turn[k] / turn[0] for turn in turns), 3) for k in ks[1:]],
        }
        for size, turns in speeds.items()
    }


def _speed(llm: LLM, prompts: Sequence[Sequence[int]], k: int, max_tokens: int) -> float:
    """Tokens a second."""
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=min(max_tokens, llm.config.max_model_len - len(prompt)),
            ignore_eos=True,
            detokenize=False,
            extra_args={"num_speculative_tokens": k},
        )
        for prompt in prompts
    ]
    began = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - began
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds
