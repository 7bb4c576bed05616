"""The contract of a drafter, put to the test: engines that draft by it, over histories drawn by chance."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from specpaged.checks import check_int
from specpaged.drafting.base import Drafter
from specpaged.llm import LLM
from specpaged.sampling_params import SamplingParams
from specpaged.testing.drafter_run import Case, DrafterRun

MAX_MODEL_LEN = 96
_K_ALONE = 4  # where proposals are compared
_DEFAULTS = {"max_num_seqs": 6, "block_size": 4, "max_model_len": MAX_MODEL_LEN}
_TINY = {"kv_cache_tokens": MAX_MODEL_LEN + 12}  # sequences are preempted, or have no room for drafts
_CHUNKED = {"max_num_batched_tokens": 16}
_CACHED = {"enable_prefix_caching": True}
# K of each engine, and how it is made otherwise. "chance" is a K of 7 at most that is drawn in every step.
_ENGINES: tuple[tuple[int | str, dict[str, Any]], ...] = (
    (1, {}),
    (2, _TINY | _CHUNKED),
    (3, _CACHED | _CHUNKED),
    (4, {"max_num_seqs": 1, "block_size": 1}),
    (5, _TINY | _CACHED),
    (6, {"num_scheduler_steps": 1}),
    (7, _TINY | _CHUNKED | _CACHED),
    ("chance", _TINY | _CHUNKED),
    ("auto", _CHUNKED),
)


@dataclass(frozen=True)
class DrafterReport:
    """What a drafter has been through. Where it has drafted nothing, little has been shown."""

    num_requests: int
    num_preemptions: int
    num_aborts: int
    num_proposals: int
    num_draft_tokens: int
    num_accepted_tokens: int


def check_drafter(
    drafter: str | Callable[..., Drafter] | Drafter,
    *,
    options: Mapping[str, Any] | None = None,
    model: str | Path | None = None,
    num_steps: int = 60,
    seed: int = 0,
    learns_from_others: bool = False,
) -> DrafterReport:
    """Run a drafter over histories drawn by chance, and hold it to its contract.

    `drafter` is what speculative_config["drafter"] takes, or a drafter that has been made; `options` is what
    speculative_config["drafter_options"] takes. The target has random weights, or is `model`, a local path. With each K
    from 1 to 7, one drawn by chance in every step, and one that is decided, an engine runs `num_steps` steps in which
    requests come and are aborted, and then to its end: greedy and sampled ones, n = 2, of various lengths, with stops;
    with chunked prefill, a prefix cache, and so little memory that sequences are preempted. Then each request runs
    alone, and all of them together: proposals have to be the same, unless the drafter `learns_from_others`.

    Raises:
        ContractError: an AssertionError that says which rule was broken, and how; `rule` is its name.
        ValueError: naming the argument, its value and what is allowed.
    """
    check_int("num_steps", num_steps, 1)
    check_int("seed", seed, 0)
    if callable(getattr(drafter, "propose", None)) and not isinstance(drafter, type):
        made, drafter = drafter, lambda _: made
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        target = _write_target(directory) if model is None else str(model)
        cases, bytes_per_token = _cases(target, rng)

        def run(k: int | str, arguments: Mapping[str, Any]) -> DrafterRun:
            arguments = _DEFAULTS | dict(arguments)
            if "kv_cache_tokens" in arguments:
                arguments["kv_cache_memory_bytes"] = arguments.pop("kv_cache_tokens") * bytes_per_token
            return DrafterRun(target, drafter, options, cases, k, arguments)

        runs = [run(k, arguments).through(random.Random(rng.random()), num_steps) for k, arguments in _ENGINES]
        runs.append(run(_K_ALONE, {}).compared(learns_from_others))
        if runs[-1].witness.gives_probs:
            rejection = run(_K_ALONE, {"verification": "rejection"})
            runs.append(rejection.through(random.Random(rng.random()), num_steps))
    metrics = [run.llm.metrics for run in runs]
    return DrafterReport(
        num_requests=sum(run.num_requests for run in runs),
        num_preemptions=sum(of_run.preemptions for of_run in metrics),
        num_aborts=sum(run.num_aborts for run in runs),
        num_proposals=sum(run.witness.num_proposals for run in runs),
        num_draft_tokens=sum(of_run.draft_tokens for of_run in metrics),
        num_accepted_tokens=sum(of_run.accepted_tokens for of_run in metrics),
    )


def _write_target(directory: str) -> str:
    """A Qwen3 of two layers and few tokens, with random weights: its outputs repeat themselves."""
    config = Qwen3Config(
        vocab_size=60, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, tie_word_embeddings=True, eos_token_id=0,
        bos_token_id=None, pad_token_id=None, initializer_range=0.3,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).eval().save_pretrained(directory)
    return directory


def _cases(target: str, rng: random.Random) -> tuple[list[Case], int]:
    """Requests with their outputs of plain decoding; and the bytes that a token's KV takes."""
    llm = LLM(target, max_model_len=MAX_MODEL_LEN)
    vocab_size = llm.engine.vocabulary.size
    prompts = [[rng.randrange(1, vocab_size) for _ in range(rng.randint(2, 40))] for _ in range(8)]
    prompts[1] = prompts[0][: len(prompts[0]) // 2] * 2  # text that repeats itself
    prompts[2] = prompts[0] + prompts[1][:5]  # of which a prefix cache knows a part
    greedy = {"temperature": 0.0, "ignore_eos": True}
    sampled = {"temperature": 0.8, "ignore_eos": True}
    params = [
        SamplingParams(max_tokens=30, **greedy),
        SamplingParams(max_tokens=24, **greedy),
        SamplingParams(max_tokens=20, seed=2, **sampled),
        SamplingParams(max_tokens=16, seed=3, n=2, **sampled),
        SamplingParams(max_tokens=28, **greedy),
        SamplingParams(max_tokens=28, seed=5, top_k=20, repetition_penalty=1.2, **sampled),
        SamplingParams(max_tokens=1, **greedy),
        SamplingParams(max_tokens=13, logprobs=1, **greedy),
    ]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    free = llm.generate(inputs, params, use_tqdm=False)
    for i in (4, 5):  # these stop in the middle
        token_ids = free[i].outputs[0].token_ids
        stop = token_ids[rng.randrange(len(token_ids) // 3, len(token_ids))]
        params[i] = replace(params[i], stop_token_ids=[stop])
    plain = llm.generate(inputs, params, use_tqdm=False)
    expected = [[completion.token_ids for completion in output.outputs] for output in plain]
    params[1] = replace(params[1], extra_args={"num_speculative_tokens": 1})
    params[7] = replace(params[7], extra_args={"num_speculative_tokens": 0})
    return list(map(Case, prompts, params, expected)), llm.engine.target.kv_cache.bytes_per_token
