"""Promise P1 (exact), P2 (rollback is bookkeeping) and P4 (nothing leaks), end to end on toy models."""

from __future__ import annotations

import os

import pytest
import torch

from specpaged import LLM, SamplingParams
from specpaged.speculative_config import DEFAULT_NUM_SPECULATIVE_TOKENS, SpeculativeConfig
from tests import toys
from tests.poison import Poison

GREEDY = {"temperature": 0, "ignore_eos": True}


def make_llm(pair, k=5, draft=None, **arguments):
    """A toy engine; K = 0 has no draft at all."""
    speculative = {"model": draft or pair.draft, "num_speculative_tokens": k}
    speculative |= arguments.pop("speculative", {})
    defaults = {"max_model_len": 256, "max_num_seqs": 8, "numerics": "exact"}
    return LLM(pair.target, speculative_config=speculative if k else None, **(defaults | arguments))


def token_ids(outputs):
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def generate(llm, prompts, params):
    """Outputs of a run after which no block is held."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.engine.check_integrity()
    assert llm.engine.allocator.num_free == llm.engine.allocator.num_blocks
    return outputs


@pytest.fixture(scope="module")
def plain(toy_pair):
    return make_llm(toy_pair, k=0, max_num_seqs=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("k", "block_size", "max_num_seqs"), [(1, 16, 8), (4, 1, 3), (7, 64, 16), (5, 16, 1)])
def test_greedy_output_is_the_same_with_and_without_speculation(toy_pair, dtype, k, block_size, max_num_seqs):
    prompts = toys.prompts(10)
    params = SamplingParams(max_tokens=30, **GREEDY)
    reference = make_llm(toy_pair, k=0, max_num_seqs=1, dtype=dtype)
    llm = make_llm(toy_pair, k=k, block_size=block_size, max_num_seqs=max_num_seqs, dtype=dtype)
    expected = token_ids([generate(reference, prompt, params)[0] for prompt in prompts])
    assert token_ids(generate(llm, prompts, params)) == expected
    assert 0 < llm.metrics.accepted_tokens < llm.metrics.draft_tokens  # neither trivially accepted nor useless
    assert llm.metrics.rollbacks > 0


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def late_stops(request, toy_pair):
    """(dtype, prompts, one SamplingParams each): every sequence stops at a token that comes late, of its own accord."""
    llm = make_llm(toy_pair, k=0, dtype=request.param)
    prompts = toys.prompts(16)
    free = token_ids(generate(llm, prompts, SamplingParams(max_tokens=60, **GREEDY)))
    stops = [max(ids, key=ids.index) for (ids,) in free]
    assert sum(ids.index(stop) + 1 for (ids,), stop in zip(free, stops, strict=True)) >= 500
    return request.param, prompts, [SamplingParams(max_tokens=90, stop_token_ids=[s], **GREEDY) for s in stops]


@pytest.mark.parametrize("max_num_seqs", [1, 8])
@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("k", [1, 4, 7])
def test_a_draft_that_is_the_target_is_always_accepted(toy_pair, late_stops, max_num_seqs, k, block_size):
    dtype, prompts, params = late_stops
    llm = make_llm(
        toy_pair,
        k=k,
        draft=toy_pair.target,
        dtype=dtype,
        max_num_seqs=max_num_seqs,
        block_size=block_size,
        speculative={"numerics": "exact"},
    )
    outputs = generate(llm, prompts, params)
    assert [output.outputs[0].finish_reason for output in outputs] == ["stop"] * 16
    metrics = llm.metrics
    assert metrics.acceptance_rate == 1.0
    # Some stops fell inside an accepted run: fewer tokens were emitted than the rounds had won.
    assert metrics.emitted_tokens < metrics.accepted_tokens + sum(output.metrics.rounds for output in outputs)


@pytest.mark.parametrize("seed", [0, 7])
def test_sampled_output_depends_on_model_prompt_parameters_and_seed_only(toy_pair, plain, seed):
    prompts = toys.prompts(12, seed=seed)
    params = [SamplingParams(temperature=0.8, seed=seed + i, max_tokens=24, ignore_eos=True) for i in range(12)]
    expected = token_ids([generate(plain, prompt, p)[0] for prompt, p in zip(prompts, params, strict=True)])
    for arguments in (
        {"k": 5},
        {"k": 2, "max_num_seqs": 3, "max_num_batched_tokens": 16},
        {"k": 0, "max_num_seqs": 12},
    ):
        assert token_ids(generate(make_llm(toy_pair, **arguments), prompts, params)) == expected


def test_an_unseeded_request_reports_the_seed_that_reproduces_it(toy_pair):
    llm = make_llm(toy_pair)
    first, second = generate(llm, toys.prompts(1) * 2, SamplingParams(max_tokens=12, ignore_eos=True))
    assert first.outputs[0].seed != second.outputs[0].seed
    again = SamplingParams(max_tokens=12, ignore_eos=True, seed=second.outputs[0].seed)
    assert token_ids(generate(llm, toys.prompts(1), again)) == token_ids([second])


@pytest.mark.parametrize("budget", [8, 13, 64])
def test_chunked_prefill_changes_nothing(toy_pair, plain, budget):
    prompts, params = toys.prompts(9, longest=90), SamplingParams(max_tokens=10, **GREEDY)
    expected = token_ids(generate(plain, prompts, params))
    llm = make_llm(toy_pair, max_num_batched_tokens=budget)
    assert token_ids(generate(llm, prompts, params)) == expected
    assert llm.metrics.accepted_tokens > 0


@pytest.mark.parametrize("k", [0, 4])
def test_preemption_changes_nothing(toy_pair, plain, k):
    prompts, params = toys.prompts(6), SamplingParams(max_tokens=60, **GREEDY)
    expected = token_ids(generate(plain, prompts, params))
    # Blocks for about one and a half sequences of 104 tokens.
    llm = make_llm(toy_pair, k=k, block_size=4, max_model_len=104, kv_cache_memory_bytes=40 * 4 * 512 * (2 if k else 1))
    outputs = generate(llm, prompts, params)
    assert token_ids(outputs) == expected
    assert llm.metrics.preemptions > 0
    assert sum(output.metrics.preemptions for output in outputs) == llm.metrics.preemptions


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("offset", [-2, -1, 0, 1, 2])
@pytest.mark.parametrize("k", [0, 5])
def test_n_completions_equal_n_requests_with_neighbouring_seeds(toy_pair, block_size, offset, k):
    prompt = toys.prompts(1, shortest=block_size + offset, longest=block_size + offset)[0]
    mates = toys.prompts(2, seed=3)
    llm = make_llm(toy_pair, k=k, block_size=block_size)
    params = SamplingParams(n=4, seed=11, temperature=1.0, max_tokens=12, ignore_eos=True)
    outputs = generate(llm, [prompt, *mates], params)
    singles = [
        generate(llm, prompt, SamplingParams(seed=11 + i, temperature=1.0, max_tokens=12, ignore_eos=True))[0]
        for i in range(4)
    ]
    assert token_ids(outputs[:1])[0] == [ids for single in token_ids(singles) for ids in single]
    assert len({tuple(ids) for ids in token_ids(outputs[:1])[0]}) > 1
    if (block_size + offset - 1) % block_size:
        assert llm.metrics.fork_copied_bytes > 0  # the partly filled block, once for each child


def test_prefix_caching_changes_nothing_and_saves_prefill(toy_pair, plain):
    shared = toys.prompts(1, shortest=50, longest=50)[0]["prompt_token_ids"]
    prompts = [{"prompt_token_ids": shared + p["prompt_token_ids"]} for p in toys.prompts(6)]
    params = SamplingParams(max_tokens=20, **GREEDY)
    expected = token_ids(generate(plain, prompts, params))
    llm = make_llm(toy_pair, max_num_seqs=2, block_size=8, enable_prefix_caching=True)
    cold = generate(llm, prompts, params)
    warm = generate(llm, prompts, params)
    assert token_ids(cold) == token_ids(warm) == expected
    assert all(output.metrics.cached_prompt_tokens >= 48 for output in warm)
    # The draft's KV of cached blocks is valid too: acceptance is that of a cold run.
    assert [o.metrics.acceptance_histogram for o in warm] == [o.metrics.acceptance_histogram for o in cold]


def test_each_request_may_ask_for_fewer_drafts_or_none(toy_pair, plain):
    prompts = toys.prompts(6)
    params = [
        SamplingParams(max_tokens=20, extra_args={"num_speculative_tokens": k}, **GREEDY) for k in (0, 1, 2, 3, 5, 0)
    ]
    llm = make_llm(toy_pair, k=5)
    outputs = generate(llm, prompts, params)
    assert token_ids(outputs) == token_ids(generate(plain, prompts, SamplingParams(max_tokens=20, **GREEDY)))
    for output, p in zip(outputs, params, strict=True):
        k = p.extra_args["num_speculative_tokens"]
        assert output.metrics.draft_tokens <= k * output.metrics.drafts
        assert (output.metrics.drafts > 0) == (k > 0)


def test_k_follows_the_batch_size(toy_pair, plain, monkeypatch):
    prompts = toys.prompts(8)
    params = [SamplingParams(max_tokens=8 + 8 * i, **GREEDY) for i in range(8)]
    llm = make_llm(toy_pair, speculative={"num_speculative_tokens_per_batch_size": [[1, 2, 5], [3, 5, 2], [6, 64, 0]]})
    score, steps = llm.engine.speculative_step.score, []

    def watched(entries, **options):
        steps.append([entry.num_draft_tokens for entry in entries])
        return score(entries, **options)

    monkeypatch.setattr(llm.engine.speculative_step, "score", watched)
    outputs = generate(llm, prompts, params)
    assert token_ids(outputs) == [token_ids(generate(plain, q, p))[0] for q, p in zip(prompts, params, strict=True)]
    assert {len(step) for step in steps} >= {1, 4, 7}  # the batch drains
    for step in steps:
        k = 5 if len(step) <= 2 else 2 if len(step) <= 5 else 0
        assert max(step) <= k
        assert max(step) == k or len(step) == 1  # fewer only at the very end of the last sequence


def test_where_nobody_says_k_it_is_decided_in_every_step_or_the_devices_by_batch_size_in_studies(toy_pair):
    for device, ranges in DEFAULT_NUM_SPECULATIVE_TOKENS.items():
        resolved = SpeculativeConfig().resolved(f"{device}:0", is_for_studies=True)
        for first, last, k in ranges:
            assert resolved.num_draft_tokens(first) == resolved.num_draft_tokens(last) == k > 0
        assert resolved.num_draft_tokens(1000) == 0
        assert resolved.max_draft_tokens == max(k for _, _, k in ranges)
    said = SpeculativeConfig(num_speculative_tokens=7).resolved("cuda")
    assert said.num_draft_tokens(1) == said.num_draft_tokens(1000) == said.max_draft_tokens == 7
    with pytest.raises(ValueError, match="says no K"):
        SpeculativeConfig().num_draft_tokens(1)
    llm = make_llm(toy_pair, speculative={"num_speculative_tokens": None})
    assert llm.config.speculative_config == SpeculativeConfig(model=toy_pair.draft, num_speculative_tokens="auto")
    assert llm.config.speculative_config.max_draft_tokens == 8
    studied = make_llm(toy_pair, speculative={"num_speculative_tokens": None}, rollback="repad")
    assert studied.config.speculative_config.num_draft_tokens(1) == 5


def test_a_draft_that_was_left_behind_catches_up(toy_pair):
    """K = 0 while three run, then 5: the draft has missed whole stretches, and is right all the same."""
    llm = make_llm(
        toy_pair,
        draft=toy_pair.target,
        speculative={"numerics": "exact", "num_speculative_tokens_per_batch_size": [[1, 2, 5]]},
    )
    params = [SamplingParams(max_tokens=n, **GREEDY) for n in (10, 50, 60)]
    generate(llm, toys.prompts(3), params)
    assert llm.metrics.draft_tokens > 0
    assert llm.metrics.acceptance_rate == 1.0


def test_decoding_with_k_zero_never_runs_the_draft(toy_pair, monkeypatch):
    llm = make_llm(toy_pair, speculative={"num_speculative_tokens_per_batch_size": [[2, 64, 5]]})
    passes = []
    greedy = llm.engine.draft.greedy

    def counting(rows, *arguments, **options):
        passes.append(rows)
        return greedy(rows, *arguments, **options)

    monkeypatch.setattr(llm.engine.draft, "greedy", counting)
    generate(llm, toys.prompts(1), SamplingParams(max_tokens=20, **GREEDY))
    assert len(passes) == 1  # behind the prefill, which others may share
    opted_out = SamplingParams(max_tokens=20, extra_args={"num_speculative_tokens": 0}, **GREEDY)
    generate(llm, toys.prompts(4), opted_out)
    assert len(passes) == 1


def test_what_was_computed_with_k_zero_is_shared_and_cached_too(toy_pair):
    prompt = toys.prompts(1, shortest=100, longest=100)[0]
    params = SamplingParams(n=4, seed=3, max_tokens=8, ignore_eos=True)
    peaks = []
    for table in ([[1, 64, 5]], [[1, 1, 5], [2, 64, 0]]):
        speculative = {"num_speculative_tokens_per_batch_size": table}
        llm = make_llm(toy_pair, enable_prefix_caching=True, speculative=speculative)
        generate(llm, prompt, params)
        peaks.append(llm.metrics.peak_blocks_in_use)
        again = generate(llm, prompt, SamplingParams(max_tokens=1, **GREEDY))
        assert again[0].metrics.cached_prompt_tokens == 96
    assert max(peaks) <= 7 + 4 * 2  # a prompt's blocks once, and two of each child's own


def test_no_output_follows_a_stop_inside_an_accepted_run(toy_pair, plain):
    prompts = toys.prompts(8)
    free = token_ids(generate(plain, prompts, SamplingParams(max_tokens=30, **GREEDY)))
    params = [SamplingParams(max_tokens=30, stop_token_ids=[ids[0][13]], **GREEDY) for ids in free]
    llm = make_llm(toy_pair, k=7, draft=toy_pair.target, speculative={"numerics": "exact"})
    for output, p, ids in zip(generate(llm, prompts, params), params, free, strict=True):
        stop = ids[0].index(p.stop_token_ids[0])
        assert output.outputs[0].token_ids == ids[0][: stop + 1]
        assert output.outputs[0].finish_reason == "stop"
        assert output.outputs[0].stop_reason == p.stop_token_ids[0]


def test_max_model_len_ends_a_sequence(toy_pair):
    llm = make_llm(toy_pair, max_model_len=48)
    for output in generate(llm, toys.prompts(4), SamplingParams(max_tokens=None, **GREEDY)):
        assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 48
        assert output.outputs[0].finish_reason == "length"


def test_an_abort_at_any_moment_leaves_mates_and_blocks_alone(toy_pair, plain):
    prompts, params = toys.prompts(5), SamplingParams(max_tokens=16, **GREEDY)
    expected = token_ids(generate(plain, prompts, params))
    for moment in range(8):
        llm = make_llm(toy_pair, max_num_batched_tokens=24)
        engine = llm.engine
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt["prompt_token_ids"], params)
        outputs = {}
        for step in range(200):
            if step == moment:
                aborted = engine.abort_request("1")
                assert aborted is None or aborted.outputs[0].finish_reason == "abort"
                engine.check_integrity()
            outputs |= {output.request_id: output for output in engine.step()}
            if not engine.has_unfinished_requests:
                break
        assert engine.abort_request("1") is None
        assert [outputs[str(i)].outputs[0].token_ids for i in (0, 2, 3, 4)] == [expected[i][0] for i in (0, 2, 3, 4)]
        assert engine.allocator.num_free == engine.allocator.num_blocks


@pytest.mark.parametrize("k", [0, 5])
def test_nan_logits_end_their_request_only_and_its_blocks_can_be_reused(toy_pair, plain, k, monkeypatch):
    """One request's logits turn to NaN; all slots that nobody owns hold NaN all along."""
    prompts, params = toys.prompts(6), SamplingParams(max_tokens=24, **GREEDY)
    expected = token_ids(generate(plain, prompts, params))
    llm = make_llm(toy_pair, k=k, max_num_seqs=3, block_size=4, kv_cache_memory_bytes=70 * 4 * 512 * (2 if k else 1))
    poison = Poison(llm, prompts[2]["prompt_token_ids"], 5, monkeypatch)
    outputs = generate(llm, prompts, params)
    assert "NaN" in outputs[2].error
    assert outputs[2].outputs[0].finish_reason == "error"
    assert outputs[2].outputs[0].token_ids == expected[2][0][: len(outputs[2].outputs[0].token_ids)]
    mates = [i for i in range(6) if i != 2]
    assert token_ids([outputs[i] for i in mates]) == [expected[i] for i in mates]
    assert poison.reused_blocks
    if k:
        assert llm.metrics.accepted_tokens > 50  # the draft's KV is read where it is valid, and only there


@pytest.mark.parametrize("max_num_seqs", [1, 4])
@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_a_draft_whose_kv_is_nan_changes_nothing(tmp_path, max_num_seqs, backend, caplog):
    """Token 0 has an embedding of NaN in the target. Plain decoding never runs it, and the draft always proposes it."""
    target = toys.model(tie_word_embeddings=False, eos_token_id=None)
    draft = toys.model(tie_word_embeddings=False, eos_token_id=None)
    with torch.no_grad():
        target.model.embed_tokens.weight[0] = float("nan")
        target.lm_head.weight[0] = 0
        draft.lm_head.weight.zero_()  # every logit is 0, and the lowest id wins
    target.save_pretrained(tmp_path / "target")
    draft.save_pretrained(tmp_path / "draft")
    pair = toys.Pair(str(tmp_path / "target"), str(tmp_path / "draft"))
    prompts, params = toys.prompts(4), SamplingParams(max_tokens=12, **GREEDY)
    expected = token_ids(generate(make_llm(pair, k=0, attention_backend=backend), prompts, params))
    assert all(0 not in output for outputs in expected for output in outputs)
    llm = make_llm(pair, k=3, max_num_seqs=max_num_seqs, block_size=4, attention_backend=backend)
    assert token_ids(generate(llm, prompts, params)) == expected
    if backend == "torch":  # where a row multiplies what it may not read by zero
        assert llm.metrics.drafts == len(prompts)  # each of them drafted once, and never again
        assert llm.metrics.requests_without_drafts == len(prompts)
        assert caplog.text.count("drafts no more: NaN beside its drafts") == len(prompts)
    else:
        assert llm.metrics.requests_without_drafts == 0
        assert llm.metrics.accepted_tokens == 0
        assert llm.metrics.drafts > len(prompts)


@pytest.mark.parametrize("k", [0, 5])
def test_what_comes_before_an_unusable_row_counts_and_may_stop_there(toy_pair, k):
    """A grammar that allows 7, then 9, then nothing: with drafts, the row that allows nothing is in the same pass."""
    tokens, masks = (7, 9), torch.zeros(3, toys.VOCAB_SIZE, dtype=torch.bool)
    masks[0, tokens[0]] = masks[1, tokens[1]] = True
    llm = make_llm(toy_pair, k=k, draft=toy_pair.target, speculative={"numerics": "exact"} if k else {})
    results = []
    for stop in ([], [tokens[1]]):
        params = SamplingParams(max_tokens=3, stop_token_ids=stop, allowed_token_ids=tokens, **GREEDY)
        llm.engine.add_request("r", toys.prompts(1)[0]["prompt_token_ids"], params)
        (sequence,) = llm.engine.requests["r"].sequences
        outputs = []
        while not outputs:
            # A serving stack's grammar: one mask per row, for the output so far plus 0, 1, .. drafts.
            done = len(sequence.output_token_ids)
            object.__setattr__(sequence.sampling_request, "token_mask", masks[[min(2, done + j) for j in range(k + 1)]])
            outputs = llm.engine.step()
        results.append((outputs[0].outputs[0].token_ids, outputs[0].outputs[0].finish_reason, outputs[0].error))
    assert results[0][:2] == ([*tokens], "error")
    assert "output token 2 hold NaN or allow no token" in results[0][2]
    assert results[1] == ([*tokens], "stop", None)


def test_a_nan_in_a_prefill_does_not_stay_in_the_prefix_cache(toy_pair, plain, monkeypatch):
    prompt = toys.prompts(1, shortest=40, longest=40)[0]
    params = SamplingParams(max_tokens=8, **GREEDY)
    llm = make_llm(toy_pair, k=0, block_size=4, max_num_batched_tokens=16, enable_prefix_caching=True)
    cache, greedy = llm.engine.target.kv_cache, llm.engine.target.greedy

    def once_broken(rows, *arguments, **options):
        found = greedy(rows, *arguments, **options)
        cache.layers[0][rows[0].blocks[0] * 4 + rows[0].context_len] = float("nan")
        monkeypatch.setattr(llm.engine.target, "greedy", greedy)
        return found

    monkeypatch.setattr(llm.engine.target, "greedy", once_broken)
    with pytest.raises(RuntimeError, match="NaN"):
        generate(llm, prompt, params)
    assert token_ids(generate(llm, prompt, params)) == token_ids(generate(plain, prompt, params))


def test_generate_leaves_requests_of_the_engine_to_who_added_them(toy_pair):
    llm = make_llm(toy_pair)
    llm.engine.add_request("mine", [1, 2, 3], SamplingParams(max_tokens=4, **GREEDY))
    with pytest.raises(RuntimeError, match=r"requests \['mine'\] were added to the engine and still run"):
        llm.generate(toys.prompts(2), use_tqdm=False)
    outputs = []
    while llm.engine.has_unfinished_requests:
        outputs += llm.engine.step()
    assert [output.request_id for output in outputs] == ["mine"]
    generate(llm, toys.prompts(2), SamplingParams(max_tokens=4, **GREEDY))


@pytest.mark.parametrize("seed", [-2, 2**64 - 1])
def test_the_seeds_of_children_that_are_reported_reproduce_them(toy_pair, seed):
    llm = make_llm(toy_pair)
    (output,) = generate(llm, toys.prompts(1), SamplingParams(n=2, seed=seed, max_tokens=8, ignore_eos=True))
    for completion in output.outputs:
        params = SamplingParams(seed=completion.seed, max_tokens=8, ignore_eos=True)
        assert token_ids(generate(llm, toys.prompts(1), params)) == [[completion.token_ids]]


def test_truncate_moves_no_kv(toy_pair, monkeypatch):
    """P2: nothing is written to either pool between the end of a pass and the next one."""
    llm = make_llm(toy_pair, k=4)
    engine = llm.engine
    commit = engine.speculative_step.commit
    changed = []

    def watched(*args):
        before = [layer.clone() for r in (engine.target, engine.draft) for layer in r.kv_cache.layers]
        commit(*args)
        after = [layer for r in (engine.target, engine.draft) for layer in r.kv_cache.layers]
        changed.append(any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, after, strict=True)))

    monkeypatch.setattr(engine.speculative_step, "commit", watched)
    generate(llm, toys.prompts(4), SamplingParams(max_tokens=40, **GREEDY))
    assert llm.metrics.rollbacks > 0
    assert llm.metrics.rollback_blocks_freed > 0
    assert not any(changed)


def test_rejection_sampling_runs_and_is_reproducible(toy_pair):
    prompts = toys.prompts(6)
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=20, ignore_eos=True) for i in range(6)]
    llm = make_llm(toy_pair, speculative={"verification": "rejection"})
    first = token_ids(generate(llm, prompts, params))
    assert token_ids(generate(llm, prompts, params)) == first
    greedy = SamplingParams(max_tokens=20, **GREEDY)
    assert token_ids(generate(llm, prompts, greedy)) == token_ids(generate(make_llm(toy_pair, k=0), prompts, greedy))
    assert 0 < llm.metrics.acceptance_rate < 1


def test_metrics_add_up(toy_pair):
    llm = make_llm(toy_pair, k=3)
    outputs = generate(llm, toys.prompts(5), SamplingParams(max_tokens=20, **GREEDY))
    m = llm.metrics
    assert m.emitted_tokens == 100
    assert m.draft_tokens == sum(o.metrics.draft_tokens for o in outputs)
    assert m.accepted_tokens == sum(o.metrics.accepted_tokens for o in outputs) == sum(m.accepted_per_position)
    for output in outputs:
        histogram = output.metrics.acceptance_histogram
        assert sum(histogram) == output.metrics.drafts
        assert sum(a * count for a, count in enumerate(histogram)) == output.metrics.accepted_tokens
        assert output.metrics.mean_acceptance_length == 1 + output.metrics.accepted_tokens / output.metrics.drafts
    assert m.peak_unverified_kv_tokens == 5 * 3
    assert (m.gathered_bytes > 0) == (llm.engine.target.model.backend == "torch")
    assert set(m.seconds) == {"schedule", "propose", "score", "verify", "commit"}
    assert m.as_dict()["acceptance_rate"] == m.accepted_tokens / m.draft_tokens


def test_k_zero_is_the_plain_path(toy_pair):
    llm = make_llm(toy_pair, k=0, speculative={})
    assert llm.engine.speculative_step.drafter is None
    zero = LLM(
        toy_pair.target,
        speculative_config=SpeculativeConfig(num_speculative_tokens=0),
        max_model_len=64,
        max_num_seqs=2,
    )
    assert zero.engine.speculative_step.drafter is None
    assert zero.engine.num_pools == 1


@pytest.mark.skipif("SPECPAGED_SPEC_BENCH" not in os.environ, reason="SPECPAGED_SPEC_BENCH names no prompts file")
@pytest.mark.parametrize(("temperature", "k"), [(0.0, None), (0.0, 2), (0.8, 2)])
def test_real_prompts_on_the_embedded_pair_are_exact(temperature, k):
    """With a fixed K drafts are sure to be made; what is decided by default depends on the machine."""
    from specpaged.prompts import clip, evenly_spread, load_prompts

    records = evenly_spread(load_prompts(os.environ["SPECPAGED_SPEC_BENCH"]), 32)
    llm = LLM(max_num_seqs=16, speculative_config=SpeculativeConfig(num_speculative_tokens=k))
    ids, _ = clip([llm.tokenizer.encode(record.text) for record in records], 400)
    prompts = [{"prompt_token_ids": x} for x in ids]
    fast = [SamplingParams(temperature=temperature, seed=i, max_tokens=32) for i in range(32)]
    slow = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=32, extra_args={"num_speculative_tokens": 0})
        for i in range(32)
    ]
    plain = [generate(llm, prompt, p)[0] for prompt, p in zip(prompts, slow, strict=True)]
    assert llm.metrics.draft_tokens == 0
    assert token_ids(generate(llm, prompts, fast)) == token_ids(plain)
    if k is not None:
        assert llm.metrics.accepted_tokens > 0
