"""Dense KV layouts in engines: toy models, every pair of schedule and rollback method, requests of all kinds."""

from __future__ import annotations

from dataclasses import replace

import torch

from specpaged import LLM, SamplingParams
from specpaged.config import ROLLBACKS, SCHEDULES
from specpaged.modeling.ragged_batch import RaggedRow, pack
from specpaged.paging.page_table import TARGET
from tests import toys

PAIRS = [
    (schedule, rollback)
    for schedule in SCHEDULES
    for rollback in ROLLBACKS
    if schedule != "exspec" or rollback in ("truncate", "group")
]
DENSE = [pair for pair in PAIRS if pair[1] != "truncate"]
PROMPTS = toys.prompts(7, seed=2, longest=24)
PARAMS = [
    SamplingParams(temperature=0, max_tokens=14, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=9, ignore_eos=True, n=2),
    SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, extra_args={"num_speculative_tokens": 1}),
    SamplingParams(temperature=1.0, seed=4, top_k=20, repetition_penalty=1.2, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=11, ignore_eos=True, extra_args={"num_speculative_tokens": 0}),
]


def make_llm(pair, schedule, rollback, k=3, **arguments):
    speculative = {"model": pair.draft, "num_speculative_tokens": k} if k else None
    defaults = {"max_model_len": 48, "max_num_seqs": 3, "max_num_batched_tokens": 32}  # prefill in chunks
    if schedule == "exspec":
        defaults["window"] = 5
    return LLM(
        pair.target, speculative_config=speculative, schedule=schedule, rollback=rollback, **(defaults | arguments)
    )


def run(llm, num_requests=None, max_tokens=16):
    """Token ids and log-probabilities of every completion, of at most so many tokens."""
    params = [replace(params, max_tokens=min(max_tokens, params.max_tokens)) for params in PARAMS]
    if not llm.engine.speculative_step.drafter:
        params = [replace(params, extra_args=None) for params in params]
    outputs = llm.generate(PROMPTS[:num_requests], params[:num_requests], use_tqdm=False)
    llm.engine.check_integrity()
    assert llm.engine.allocator.num_held == 0
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [(completion.token_ids, completion.logprobs) for output in outputs for completion in output.outputs]


def check_attention_reads_the_tensor_that_is_realigned(llm):
    """One element of it, and the logits change; any other one around them, and they do not."""
    engine = llm.engine
    for i, prompt in enumerate(PROMPTS[:3]):
        engine.add_request(str(i), prompt["prompt_token_ids"], PARAMS[0])
    while len(engine.scheduler.running) < 3 or any(len(s.output_token_ids) < 4 for s in engine.scheduler.running):
        assert not engine.step(), "nobody may end before"
    sequence = engine.scheduler.running[1]
    table, cache = sequence.page_table, engine.target.kv_cache
    (slot,), context_len = table.entries, table.context_lens[TARGET]
    row = RaggedRow(sequence.token_ids[-1:], context_len, table.entries, 1)

    def logits():
        return engine.target.forward(pack([row], cache.block_size, "cpu", cache.block_stride)).logits

    before = logits()
    outside = torch.ones(len(cache.layers[0]), dtype=torch.bool)
    outside[slot : slot + context_len + 1] = False
    for layer in cache.layers:
        layer[outside] = float("nan")
    assert torch.equal(logits(), before)
    for position in (0, context_len // 2, context_len - 1):
        element = cache.layers[0][slot + position, 1, 0]
        element[0] += 1.0
        changed = logits()
        assert not torch.equal(changed, before)
        assert changed.isfinite().all()
        element[0] -= 1.0
