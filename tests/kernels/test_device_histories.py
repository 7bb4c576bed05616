"""Random requests on an engine whose rounds are the device's: whatever happens to one, its output is plain decoding's.

On the kernels' references, with NaN wherever nobody owns a slot. SPECPAGED_ALL_HISTORIES tries more of them.
"""

from __future__ import annotations

import os
import random

import pytest

from specpaged import LLM, SamplingParams
from tests import toys
from tests.engine.test_decisions import with_whim
from tests.engine.test_engine_histories import BYTES_PER_TOKEN, outcome
from tests.kernels import references
from tests.poison import slots

MAX_MODEL_LEN, BLOCK_SIZE = 64, 16


def random_params(rng: random.Random) -> SamplingParams:
    greedy = rng.random() < 0.5
    return SamplingParams(
        temperature=0 if greedy else rng.choice([0.8, 1.0]),
        seed=rng.randrange(100),
        max_tokens=rng.choice([1, 2, 7, 16, 60]),
        n=1 if greedy else rng.choice([1, 1, 3]),
        logprobs=rng.choice([None] * 5 + [2]),  # those and the next are the host's
        repetition_penalty=rng.choice([1.0] * 5 + [1.3]),
        min_tokens=rng.choice([0, 0, 1]),
        stop_token_ids=rng.choice([[], [5, 6, 7], list(range(20, 60))]),
        ignore_eos=rng.random() < 0.5,
    )


def poison(engine) -> None:
    """NaN in every slot that holds nothing: of blocks that a round in flight may write, in none."""
    is_ahead = engine._flight is not None
    cached = [block for block in range(1, engine.allocator.num_blocks + 1) if engine.allocator.is_cached(block)]
    for pool, runner in enumerate(filter(None, (engine.target, engine.draft))):
        owned = set(slots(cached, len(cached) * BLOCK_SIZE, BLOCK_SIZE))
        for sequence in engine.scheduler:
            table = sequence.page_table
            if pool < len(table.context_lens):
                owned.update(slots(table.blocks, table.capacity if is_ahead else table.context_lens[pool], BLOCK_SIZE))
        runner.kv_cache.fill_unowned(owned)


@pytest.fixture(scope="module", autouse=True)
def _references():
    with pytest.MonkeyPatch.context() as monkeypatch:
        references.put_in_place(monkeypatch)
        yield


@pytest.fixture(scope="module")
def plain(toy_pair, _references):
    return LLM(toy_pair.target, attention_backend="triton", max_model_len=MAX_MODEL_LEN, max_num_seqs=1)


@pytest.mark.parametrize("history", range(60 if "SPECPAGED_ALL_HISTORIES" in os.environ else 10))
def test_output_is_plain_decodings_through_preemption_chunks_forks_caching_and_aborts(toy_pair, plain, history):
    rng = random.Random(history)
    k, draft_is_target = rng.choice([0, 1, 2, 3]), rng.random() < 0.5
    draft = toy_pair.target if draft_is_target else toy_pair.draft
    speculative = {"model": draft, "num_speculative_tokens": k, "numerics": "exact"}
    if k and rng.random() < 0.3:
        speculative["num_speculative_tokens_per_batch_size"] = [[1, 2, k], [3, 3, 0], [4, 64, 1]]
        del speculative["num_speculative_tokens"]
    elif k and rng.random() < 0.4:
        speculative |= {"num_speculative_tokens": "auto", "max_num_speculative_tokens": k}
    elif k and rng.random() < 0.5:
        speculative |= {"selection": "tetris", "tetris_extra_proposals": rng.choice([1, 2])}
    # Hardly more than one sequence needs, or enough.
    memory = rng.choice([5, 7, 30]) * BLOCK_SIZE * BYTES_PER_TOKEN * (2 if k else 1)
    llm = make(toy_pair.target, speculative if k else None, rng, history, kv_cache_memory_bytes=memory)
    if k and llm.config.speculative_config.is_adaptive:
        with_whim(llm, history, looks_back=False)
    assert "a round failed" not in run(llm, plain, rng, history)
    if k and draft_is_target:
        assert llm.metrics.acceptance_rate in (None, 1.0)


@pytest.mark.parametrize("history", range(2))
@pytest.mark.parametrize("method", ["ngram", "eagle3", "clover"])
def test_output_is_plain_decodings_whoever_drafts(target, heads, method, history):
    """Rounds of lookups and of heads are the host's, whatever the engine is asked for."""
    rng = random.Random(history)
    speculative = {"method": method, "num_speculative_tokens": rng.choice([1, 2, 3])}
    if method in heads:
        speculative["model"] = heads[method]
    plain = LLM(target[0], attention_backend="triton", max_model_len=MAX_MODEL_LEN, max_num_seqs=1)
    llm = make(target[0], speculative, rng, history)
    assert run(llm, plain, rng, history) == {"drafter"}


def make(target, speculative, rng: random.Random, history: int, **arguments) -> LLM:
    return LLM(
        target,
        speculative_config=speculative,
        attention_backend="triton",
        device_round=True,
        synchronous=history % 2 == 0,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=rng.choice([2, 4]),
        max_num_batched_tokens=rng.choice([8, 20, 100]),
        enable_prefix_caching=rng.random() < 0.5,
        **arguments,
    )


def run(llm: LLM, plain: LLM, rng: random.Random, history: int) -> set[str]:
    """Six requests, of which some are aborted; why steps were the host's."""
    engine = llm.engine
    prompts = toys.prompts(6, seed=history, shortest=1, longest=30)
    prompts[5] = {"prompt_token_ids": prompts[4]["prompt_token_ids"] + [1, 2]}  # something to find in the cache
    requests, outputs, aborted, step = {}, {}, set(), 0
    while len(requests) < 6 or engine.has_unfinished_requests:
        if len(requests) < 6 and rng.random() < 0.4:
            request_id = str(len(requests))
            requests[request_id] = prompts[len(requests)], random_params(rng)
            engine.add_request(request_id, requests[request_id][0]["prompt_token_ids"], requests[request_id][1])
        if engine.requests and rng.random() < 0.04:
            request_id = rng.choice(sorted(engine.requests))
            assert engine.abort_request(request_id).finished
            aborted.add(request_id)
        poison(engine)
        outputs |= {output.request_id: output for output in engine.step()}
        engine.check_integrity()
        step += 1
        assert step < 1000
    assert engine.allocator.num_free == engine.allocator.num_blocks
    assert outputs.keys() | aborted == requests.keys()
    assert not outputs.keys() & aborted
    # Some rounds were the device's, unless somebody has kept all of them from it.
    kept = engine.host_steps.keys() & {"logprobs", "processing", "drafter"}
    assert sum(engine.host_steps.values()) < step or kept, engine.host_steps
    for request_id, output in outputs.items():
        assert outcome(output) == outcome(plain.generate(*requests[request_id], use_tqdm=False)[0]), request_id
    return set(engine.host_steps)
