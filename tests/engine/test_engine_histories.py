"""Random engines under random requests: whatever happens to a request, its output is that of plain decoding alone."""

from __future__ import annotations

import random

import pytest

from specpaged import SamplingParams
from tests import toys
from tests.engine.test_engine import make_llm

MAX_MODEL_LEN = 96
BYTES_PER_TOKEN = 512  # of a toy model's KV


def random_params(rng: random.Random) -> dict:
    choices = {
        "temperature": rng.choice([0, 0.8, 1.0]),
        "seed": rng.randrange(100),
        "max_tokens": rng.choice([1, 2, 9, 24, 40]),
        "n": rng.choice([1, 1, 3]),
        "logprobs": rng.choice([None, None, 2]),
        "prompt_logprobs": rng.choice([None, None, 1]),
        "min_tokens": rng.choice([0, 0, 1]),
        "repetition_penalty": rng.choice([1.0, 1.0, 1.3]),
        "stop_token_ids": rng.choice([[], [5, 6, 7], list(range(20, 60))]),
        "ignore_eos": rng.random() < 0.5,
    }
    if choices["temperature"] == 0:
        choices["n"] = 1
    return choices


def outcome(output) -> tuple:
    completions = [(c.token_ids, c.finish_reason, c.stop_reason, c.logprobs) for c in output.outputs]
    return output.error, output.prompt_logprobs, completions


@pytest.fixture(scope="module")
def plain(toy_pair):
    return make_llm(toy_pair, k=0, max_num_seqs=1, max_model_len=MAX_MODEL_LEN)


@pytest.mark.parametrize("history", range(8))
def test_output_is_plain_decodings_through_preemption_chunks_forks_caching_and_aborts(toy_pair, plain, history):
    rng = random.Random(history)
    k, block_size = rng.choice([0, 1, 3, 5]), rng.choice([1, 4, 16])
    num_blocks = -(-MAX_MODEL_LEN // block_size) + rng.choice([0, 2, 20])  # hardly more than one sequence needs
    speculative = {}
    if k and rng.random() < 0.5:
        speculative["num_speculative_tokens_per_batch_size"] = [[1, 2, k], [3, 3, 0], [4, 64, 1]]
    draft_is_target = history % 2 == 0  # whose drafts are all accepted, whatever happens to the KV that they are from
    if k and draft_is_target:
        speculative["numerics"] = "exact"
    llm = make_llm(
        toy_pair, k=k, draft=toy_pair.target if draft_is_target else None, speculative=speculative,
        block_size=block_size, max_model_len=MAX_MODEL_LEN,
        max_num_seqs=rng.choice([2, 5, 8]), max_num_batched_tokens=rng.choice([8, 20, 200]),
        enable_prefix_caching=rng.random() < 0.5,
        kv_cache_memory_bytes=num_blocks * block_size * BYTES_PER_TOKEN * (2 if k else 1),
    )  # fmt: skip
    engine = llm.engine
    prompts = toys.prompts(10, seed=history, shortest=1, longest=50)
    prompts[5] = {"prompt_token_ids": prompts[4]["prompt_token_ids"] + [1, 2]}  # something to find in the cache
    requests = {}
    outputs, aborted, step = {}, set(), 0
    while len(requests) < 10 or engine.has_unfinished_requests:
        if len(requests) < 10 and rng.random() < 0.5:
            request_id = str(len(requests))
            params = random_params(rng)
            opt_out = {"extra_args": {"num_speculative_tokens": 0}} if rng.random() < 0.2 else {}
            requests[request_id] = (prompts[len(requests)], SamplingParams(**params))
            ids = prompts[int(request_id)]["prompt_token_ids"]
            engine.add_request(request_id, ids, SamplingParams(**params, **opt_out))
        if engine.requests and rng.random() < 0.03:
            request_id = rng.choice(sorted(engine.requests))
            assert engine.abort_request(request_id).finished
            aborted.add(request_id)
        outputs |= {output.request_id: output for output in engine.step()}
        engine.check_integrity()
        step += 1
        assert step < 2000
    assert engine.allocator.num_free == engine.allocator.num_blocks
    if draft_is_target:
        assert engine.metrics.acceptance_rate in (None, 1.0)
    assert outputs.keys() | aborted == requests.keys()
    assert not outputs.keys() & aborted
    for request_id, output in outputs.items():
        assert outcome(output) == outcome(plain.generate(*requests[request_id], use_tqdm=False)[0]), request_id
