"""A draft whose KV has a pool of its own, or a window: it decides nothing, so that outputs stay what they are."""

from __future__ import annotations

import random

import pytest

from specpaged import LLM, SamplingParams
from specpaged.modeling.model_runner import ModelRunner
from tests import toys
from tests.engine.test_engine import make_llm
from tests.engine.test_engine_histories import outcome, random_params

MAX_MODEL_LEN = 160
BYTES_PER_TOKEN = 512  # of a toy model's KV


def run(llm: LLM, prompts: list[dict], **params):
    outputs = llm.generate(prompts, SamplingParams(**{"temperature": 0, "ignore_eos": True} | params), use_tqdm=False)
    llm.engine.check_integrity()
    llm.engine.check_idle()
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def plain(toy_pair):
    return make_llm(toy_pair, k=0, max_num_seqs=1, max_model_len=MAX_MODEL_LEN)


@pytest.mark.parametrize("history", range(6))
def test_output_is_plain_decodings_whatever_room_the_draft_has(toy_pair, plain, history):
    rng = random.Random(history)
    block_size = rng.choice([4, 16])
    num_blocks = -(-MAX_MODEL_LEN // block_size) + rng.choice([0, 3, 30])  # hardly more than one sequence needs
    num_draft_blocks = rng.choice([4, 12, 80])
    of_draft = num_draft_blocks * block_size * BYTES_PER_TOKEN
    narrow = ("auto", "bfloat16", "fp8_e4m3")[history // 2 % 3]
    speculative = {"kv_cache_memory_bytes": of_draft, "kv_cache_dtype": narrow}
    if history % 2:
        speculative |= {"kv_window": 64}
    llm = make_llm(
        toy_pair, k=rng.choice([1, 3, 5]), speculative=speculative, block_size=block_size, max_model_len=MAX_MODEL_LEN,
        max_num_seqs=rng.choice([2, 5, 8]), max_num_batched_tokens=rng.choice([8, 20, 200]),
        enable_prefix_caching=rng.random() < 0.5,
        kv_cache_memory_bytes=num_blocks * block_size * BYTES_PER_TOKEN + of_draft,
    )  # fmt: skip
    engine, prompts = llm.engine, toys.prompts(8, seed=history, shortest=1, longest=110)
    prompts[5] = {"prompt_token_ids": prompts[4]["prompt_token_ids"] + [1, 2]}  # something to find in the cache
    requests, outputs = {}, {}
    while len(requests) < 8 or engine.has_unfinished_requests:
        if len(requests) < 8 and rng.random() < 0.5:
            request_id, params = str(len(requests)), SamplingParams(**random_params(rng))
            requests[request_id] = prompts[len(requests)], params
            engine.add_request(request_id, requests[request_id][0]["prompt_token_ids"], params)
        outputs |= {output.request_id: output for output in engine.step()}
        engine.check_integrity()
    engine.check_idle()
    for request_id, output in outputs.items():
        assert outcome(output) == outcome(plain.generate(*requests[request_id], use_tqdm=False)[0]), request_id


@pytest.mark.parametrize("num_scheduler_steps", [1, 4])
@pytest.mark.parametrize("narrow", ["bfloat16", "fp8_e4m3"])
def test_a_draft_with_narrow_kv_drafts_and_outputs_are_plain_decodings(toy_pair, plain, narrow, num_scheduler_steps):
    """It is the target itself, whose drafts would all stand with KV as it is."""
    llm = make_llm(
        toy_pair, k=3, draft=toy_pair.target, max_model_len=MAX_MODEL_LEN, num_scheduler_steps=num_scheduler_steps,
        speculative={"numerics": "exact", "kv_cache_dtype": narrow},
    )  # fmt: skip
    prompts = toys.prompts(5, shortest=20)
    assert run(llm, prompts, max_tokens=40) == [run(plain, [prompt], max_tokens=40)[0] for prompt in prompts]
    assert llm.engine.draft.kv_cache.bytes_per_token < llm.engine.target.kv_cache.bytes_per_token
    assert 0.5 < llm.metrics.acceptance_rate < 1.0


@pytest.mark.parametrize("num_scheduler_steps", [1, 4])
def test_all_drafts_stand_of_a_draft_that_is_the_target_in_a_pool_of_its_own(toy_pair, num_scheduler_steps):
    """In rounds of one call, too, where the C++ code finds the draft's KV in blocks of its own."""
    llm = make_llm(
        toy_pair, k=3, draft=toy_pair.target, max_model_len=MAX_MODEL_LEN, num_scheduler_steps=num_scheduler_steps,
        speculative={"numerics": "exact", "kv_cache_memory_bytes": 60 * 16 * BYTES_PER_TOKEN},
    )  # fmt: skip
    run(llm, toys.prompts(5, shortest=20), max_tokens=40)
    assert llm.metrics.acceptance_rate == 1.0
    assert llm.metrics.draft_tokens > 0
    assert llm.metrics.peak_draft_blocks_in_use > 0
    assert llm.metrics.requests_without_draft_kv == 0


def test_rounds_of_one_call_draft_by_the_window_that_single_ones_draft_by(toy_pair, monkeypatch):
    honest, drafted_in_call = ModelRunner.rounds, []

    def rounds(self, rows, *arguments):
        found = honest(self, rows, *arguments)
        drafted_in_call.append(found.drafts and all(row.num_skipped for row in rows))
        return found

    monkeypatch.setattr(ModelRunner, "rounds", rounds)

    def drafted(num_scheduler_steps: int) -> tuple:
        llm = make_llm(
            toy_pair, k=3, draft=toy_pair.target, speculative={"numerics": "exact", "kv_window": 64},
            max_model_len=MAX_MODEL_LEN, num_scheduler_steps=num_scheduler_steps,
        )  # fmt: skip
        run(llm, toys.prompts(4, shortest=100, longest=120), max_tokens=14)  # within which no window slides twice
        return llm.metrics.accepted_per_position, llm.metrics.draft_tokens

    single = drafted(1)
    assert drafted_in_call == []
    several = drafted(4)
    assert any(drafted_in_call)
    assert single == several
    assert 0 < sum(single[0]) < single[1]  # the draft has not read all, and so does not say all that the target says


def test_a_window_holds_no_more_blocks_than_it_has_tokens_for(toy_pair, plain):
    llm = make_llm(toy_pair, k=3, speculative={"kv_window": 64}, max_model_len=MAX_MODEL_LEN, max_num_seqs=4)
    assert llm.engine.draft.kv_cache.num_blocks == 4 * 64 // 16
    assert "16 of the draft's own" in str(llm.report)
    prompts = toys.prompts(6, shortest=60, longest=80)
    assert run(llm, prompts, max_tokens=70) == [run(plain, [prompt], max_tokens=70)[0] for prompt in prompts]
    assert llm.metrics.peak_draft_blocks_in_use == 16
    assert llm.metrics.accepted_tokens > 0
    assert llm.metrics.requests_without_draft_kv == 0


def test_requests_beyond_the_drafts_budget_decode_plainly_and_are_counted(toy_pair, plain):
    llm = make_llm(
        toy_pair, k=3, max_model_len=MAX_MODEL_LEN, max_num_seqs=4,
        speculative={"kv_cache_memory_bytes": 6 * 16 * BYTES_PER_TOKEN},
    )  # fmt: skip
    prompts = toys.prompts(4, shortest=30, longest=34)
    assert run(llm, prompts, max_tokens=20) == [run(plain, [prompt], max_tokens=20)[0] for prompt in prompts]
    metrics = llm.metrics
    assert metrics.requests_without_draft_kv == 3  # three blocks are not enough for who grows beyond 48 tokens
    assert metrics.accepted_tokens > 0
    assert metrics.peak_draft_blocks_in_use <= 6


def test_what_the_draft_does_not_hold_is_the_targets(toy_pair):
    memory = 100 * 16 * BYTES_PER_TOKEN
    arguments = {"max_model_len": MAX_MODEL_LEN, "kv_cache_memory_bytes": memory}

    def blocks(max_num_seqs: int = 16, **speculative) -> list[int]:
        engine = make_llm(toy_pair, k=3, speculative=speculative, max_num_seqs=max_num_seqs, **arguments).engine
        return [runner.kv_cache.num_blocks for runner in (engine.target, engine.draft)]

    assert blocks() == [50, 50]
    assert blocks(kv_cache_memory_bytes=memory // 5) == [80, 20]
    assert blocks(7, kv_window=64) == [100 - 4 * 7, 4 * 7]  # seven sequences, of which the draft reads four blocks each
    assert blocks(kv_window=64) == [50, 50]  # sixteen may all be short
    with pytest.raises(ValueError) as error:
        blocks(kv_cache_memory_bytes=BYTES_PER_TOKEN)
    assert (
        "speculative_config['kv_cache_memory_bytes']=512 holds 0 tokens of the draft's KV; allowed: at least 5"
        in str(error.value)
    )
    with pytest.raises(ValueError) as error:
        blocks(kv_cache_memory_bytes=memory)
    assert f"kv_cache_memory_bytes={memory} beside the draft's" in str(error.value)


@pytest.mark.parametrize(
    ("speculative", "arguments", "message"),
    [
        ({"kv_window": 63}, {}, "speculative_config['kv_window']=63 must be an int >= 64"),
        ({"kv_cache_memory_bytes": 0}, {}, "speculative_config['kv_cache_memory_bytes']=0 must be an int >= 1"),
        (
            {"kv_window": 64},
            {"schedule": "eqspec"},
            "speculative_config['kv_window']=64 is for schedule='continuous', 'overlap', 'auto' and "
            "rollback='truncate' alone",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(toy_pair, speculative, arguments, message):
    with pytest.raises(ValueError) as error:
        make_llm(toy_pair, k=3, speculative=speculative, **arguments)
    assert message in str(error.value)


def test_methods_without_a_draft_model_have_no_pool():
    with pytest.raises(ValueError, match=r"speculative_config\['kv_window'\]=64 is for method 'draft_model' alone"):
        LLM(speculative_config={"method": "ngram", "kv_window": 64})
