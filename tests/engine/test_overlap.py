"""Steps of half a batch, beside a proposal for the other half: outputs are plain decoding's, and nothing leaks."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from specpaged import SamplingParams
from specpaged.config import BY_HALVES
from specpaged.engine.draft_planner import DraftPlanner
from specpaged.engine.lanes import Lanes, split_cores
from specpaged.engine.overlap_engine import OverlapEngine
from specpaged.engine.sequence import SequenceStatus
from specpaged.paging.block_allocator import IntegrityError
from specpaged_kernels.cpu import linear
from specpaged_kernels.cpu.library import STORAGE, why_not
from tests import toys
from tests.engine import failure_histories
from tests.engine.test_decisions import PARAMS, Whim
from tests.engine.test_engine import GREEDY, generate, make_llm, token_ids
from tests.engine.test_engine_histories import BYTES_PER_TOKEN, MAX_MODEL_LEN, outcome, random_params
from tests.heads_world import heads_llm, plain_llm
from tests.poison import slots

SAMPLED = {"temperature": 0.9, "seed": 7, "ignore_eos": True}
PATIENCE = 30.0  # seconds that a lane waits for the other one, before it says that it runs alone


def in_a_lane():
    return threading.current_thread().name.startswith("specpaged-")


@pytest.fixture(scope="module")
def plain(toy_pair):
    return make_llm(toy_pair, k=0, max_num_seqs=1)


@pytest.fixture(scope="module")
def short_plain(toy_pair):
    return make_llm(toy_pair, k=0, max_num_seqs=1, max_model_len=MAX_MODEL_LEN)


def finish(engine):
    """The outputs of steps to the end of all requests, by request."""
    outputs = {}
    while engine.has_unfinished_requests:
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs


def overlapping(pair, **arguments):
    llm = make_llm(pair, **({"schedule": "overlap"} | arguments))
    assert isinstance(llm.engine, OverlapEngine) == (llm.config.schedule in BY_HALVES)
    return llm


@pytest.mark.parametrize("kind", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"k": 1, "block_size": 1, "max_num_seqs": 2},
        {"k": 3, "max_num_batched_tokens": 12, "attention_backend": "torch"},
        {"speculative": {"num_speculative_tokens_per_batch_size": [[1, 3, 4], [4, 6, 0], [7, 8, 2]]}},
        {"k": 2, "speculative": {"selection": "tetris", "tetris_extra_proposals": 2}},
        {"speculative": {"model": None, "method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}},
        {"speculative": {"model": None, "method": "suffix"}, "k": 3},
        {"speculative": {"method": ["draft_model", "ngram"]}, "k": 3},
        {"speculative": {"kv_window": 64, "kv_cache_memory_bytes": 40 * 16 * BYTES_PER_TOKEN}, "k": 3},
    ],
    ids=["", "two", "torch", "by batch size", "tetris", "ngram", "suffix", "combined", "own pool"],
)
def test_outputs_are_those_of_plain_decoding(toy_pair, plain, kind, arguments):
    prompts, params = toys.prompts(11, longest=60), SamplingParams(max_tokens=30, **kind)
    expected = token_ids([generate(plain, prompt, params)[0] for prompt in prompts])
    llm = overlapping(toy_pair, **arguments)
    assert token_ids(generate(llm, prompts, params)) == expected
    assert llm.metrics.overlapped_steps > 5
    assert llm.metrics.accepted_tokens > 0


@pytest.mark.parametrize("method", ["eagle3", "clover"])
def test_heads_draft_behind_their_own_halfs_verification(target, heads, method):
    prompts = toys.prompts(7, longest=30)
    prompts[6] = {"prompt_token_ids": prompts[0]["prompt_token_ids"] * 2}  # something to find in the cache
    caching = {"enable_prefix_caching": True, "max_num_seqs": 4}
    for params in (SamplingParams(max_tokens=30, **GREEDY), SamplingParams(max_tokens=30, **SAMPLED)):
        expected = token_ids([generate(plain_llm(target), prompt, params)[0] for prompt in prompts])
        llm = heads_llm(target, method, heads[method], schedule="overlap", **caching)
        assert token_ids(generate(llm, prompts, params)) == expected
        assert llm.metrics.overlapped_steps > 5
        assert llm.metrics.requests_without_drafts == 0
        sequential = heads_llm(target, method, heads[method], **caching)
        generate(sequential, prompts, params)
        assert llm.metrics.acceptance_rate == pytest.approx(sequential.metrics.acceptance_rate, abs=0.05)


@pytest.mark.parametrize("kind", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
@pytest.mark.parametrize("schedule", ["overlap", "continuous"])
def test_a_draft_on_a_device_of_its_own_proposes_the_same(toy_pair, kind, verification, schedule):
    prompts, params = toys.prompts(7), SamplingParams(max_tokens=20, **kind)
    beside, apart = (
        overlapping(toy_pair, speculative={"verification": verification, "device": device}, schedule=schedule)
        for device in (None, "cpu:0")  # of which torch says that they differ
    )
    assert apart.engine.draft.model.device != apart.engine.target.model.device
    assert token_ids(generate(apart, prompts, params)) == token_ids(generate(beside, prompts, params))
    assert apart.metrics.accepted_tokens == beside.metrics.accepted_tokens > 0


def test_with_rejection_sampling_greedy_outputs_are_the_same(toy_pair, plain):
    prompts, params = toys.prompts(6), SamplingParams(max_tokens=20, **GREEDY)
    expected = token_ids([generate(plain, prompt, params)[0] for prompt in prompts])
    llm = overlapping(toy_pair, speculative={"verification": "rejection"})
    assert token_ids(generate(llm, prompts, params)) == expected
    generate(llm, prompts, SamplingParams(max_tokens=20, **SAMPLED))  # their probabilities come across, too


@pytest.mark.parametrize("seed", range(3))
def test_decisions_of_every_kind_change_no_output(toy_pair, plain, seed):
    prompts, params = toys.prompts(len(PARAMS) * 2, seed=seed), PARAMS * 2
    plainly = [replace(of_request, extra_args=None) for of_request in params]
    expected = [outcome(plain.generate(*pair, use_tqdm=False)[0]) for pair in zip(prompts, plainly, strict=True)]
    llm = overlapping(toy_pair)
    llm.engine.speculative_step.planner = DraftPlanner(Whim(seed))
    assert list(map(outcome, generate(llm, prompts, params))) == expected
    assert llm.metrics.overlapped_steps > 0


@pytest.mark.parametrize("history", range(10))
def test_output_is_plain_decodings_through_whatever_happens_while_both_lanes_run(toy_pair, short_plain, history):
    rng = random.Random(history)
    k, block_size = rng.choice([1, 3, 5]), rng.choice([1, 4, 16])
    num_blocks = -(-MAX_MODEL_LEN // block_size) + rng.choice([0, 2, 20, 60])  # the fewest: what one sequence needs
    draft_is_target = history % 2 == 0  # whose drafts all stand, if the KV that they are from is right
    llm = overlapping(
        toy_pair, k=k, draft=toy_pair.target if draft_is_target else None,
        speculative={"numerics": "exact"} if draft_is_target else {},
        block_size=block_size, max_model_len=MAX_MODEL_LEN,
        max_num_seqs=rng.choice([2, 5, 8]), max_num_batched_tokens=rng.choice([8, 20, 200]),
        enable_prefix_caching=rng.random() < 0.5,
        kv_cache_memory_bytes=num_blocks * block_size * BYTES_PER_TOKEN * 2,
    )  # fmt: skip
    engine = llm.engine
    prompts = toys.prompts(10, seed=history, shortest=1, longest=50)
    prompts[5] = {"prompt_token_ids": prompts[4]["prompt_token_ids"] + [1, 2]}  # something to find in the cache
    requests, outputs, aborted, step = {}, {}, set(), 0
    while len(requests) < 10 or engine.has_unfinished_requests:
        if len(requests) < 10 and rng.random() < 0.9:
            request_id = str(len(requests))
            params = random_params(rng) | {"max_tokens": rng.choice([2, 9, 24, 40])}
            opt_out = {"extra_args": {"num_speculative_tokens": 0}} if rng.random() < 0.2 else {}
            requests[request_id] = (prompts[len(requests)], SamplingParams(**params))
            ids = prompts[int(request_id)]["prompt_token_ids"]
            engine.add_request(request_id, ids, SamplingParams(**params, **opt_out))
        if engine.requests and rng.random() < 0.04:
            request_id = rng.choice(sorted(engine.requests))
            assert engine.abort_request(request_id).finished
            aborted.add(request_id)
        outputs |= {output.request_id: output for output in engine.step()}
        engine.check_integrity()
        step += 1
        assert step < 3000
    assert engine.allocator.num_free == engine.allocator.num_blocks
    assert engine.metrics.overlapped_steps > 0
    if draft_is_target:
        assert engine.metrics.acceptance_rate in (None, 1.0)
    assert outputs.keys() | aborted == requests.keys()
    for request_id, output in outputs.items():
        assert outcome(output) == outcome(short_plain.generate(*requests[request_id], use_tqdm=False)[0]), request_id


def test_lanes_read_no_slot_that_holds_nobodys_kv(toy_pair, plain, monkeypatch):
    prompts, params = toys.prompts(9), SamplingParams(max_tokens=25, **GREEDY)
    expected = token_ids([generate(plain, prompt, params)[0] for prompt in prompts])
    llm = overlapping(toy_pair, draft=toy_pair.target, speculative={"numerics": "exact"}, block_size=4)
    engine, honest = llm.engine, llm.engine.scheduler.schedule

    def schedule():
        tables = [sequence.page_table for sequence in engine.scheduler]
        for pool, runner in enumerate((engine.target, engine.draft)):
            runner.kv_cache.fill_unowned({i for t in tables for i in slots(t.blocks, t.context_lens[pool], 4)})
        return honest()

    monkeypatch.setattr(engine.scheduler, "schedule", schedule)
    assert token_ids(generate(llm, prompts, params)) == expected
    assert llm.metrics.acceptance_rate == 1.0
    assert llm.metrics.overlapped_steps > 5


@pytest.fixture(scope="module")
def text_plain(tokenizer_pair):
    return make_llm(tokenizer_pair, k=0, max_num_seqs=1, max_model_len=failure_histories.MAX_MODEL_LEN)


def test_whatever_fails_in_a_lane_or_between_costs_nobody_a_token(tokenizer_pair, text_plain):
    failed = Counter()
    for seed in range(12):
        failed += failure_histories.run_history(seed, tokenizer_pair, text_plain, schedule="overlap")
    assert failed.total() > 5


def test_lanes_run_beside_one_another(toy_pair, monkeypatch):
    llm = overlapping(toy_pair)
    step, meeting, num_met = llm.engine.speculative_step, threading.Barrier(2), Counter()

    def meets(owner, method):
        honest = getattr(owner, method)

        def call(*arguments, **options):
            if in_a_lane():
                meeting.wait(PATIENCE)  # raises where the other lane does not come
                num_met[method] += 1
            return honest(*arguments, **options)

        monkeypatch.setattr(owner, method, call)

    meets(step, "score")
    meets(step.drafter, "propose")
    generate(llm, toys.prompts(6), SamplingParams(max_tokens=20, **GREEDY))
    assert num_met["score"] == num_met["propose"] == llm.metrics.overlapped_steps > 5
    assert llm.metrics.overlapped_seconds > 0
    assert llm.metrics.failed_steps == llm.metrics.failed_proposals == 0


def test_sequences_and_page_tables_change_while_no_lane_runs(toy_pair, monkeypatch):
    llm = overlapping(toy_pair, block_size=1)
    engine, seen = llm.engine, []
    honest = Lanes.run

    def state():
        return [
            (s.request_id, list(s.token_ids), list(s.page_table.blocks), list(s.page_table.context_lens), s.draft)
            for s in engine.scheduler
        ], engine.allocator.num_free

    def run(lanes, verify, draft):
        before = state()
        found = honest(lanes, verify, draft)
        assert state() == before
        assert found[0][0].rounds is None  # several in a call would need slots, and the drafter
        seen.append(before)
        return found

    monkeypatch.setattr(Lanes, "run", run)
    generate(llm, toys.prompts(9, longest=60), SamplingParams(max_tokens=20, **GREEDY))
    assert len(seen) > 5


def test_who_is_preempted_while_its_drafts_are_due_gets_none(toy_pair, plain, monkeypatch):
    prompts, params = toys.prompts(6), SamplingParams(max_tokens=20, **GREEDY)
    expected = token_ids([generate(plain, prompt, params)[0] for prompt in prompts])
    llm = overlapping(toy_pair)
    scheduler, victims = llm.engine.scheduler, []
    honest = scheduler.schedule

    def schedule():
        scheduled = honest()
        due = [sequence for sequence in scheduler.running if sequence in scheduler._drafting]
        if due and len(victims) < 3:
            victims.append(due[-1])
            scheduler._preempt(due[-1])
            scheduled = replace(scheduled, preempted=(*scheduled.preempted, due[-1]))
        return scheduled

    monkeypatch.setattr(scheduler, "schedule", schedule)
    for i, prompt in enumerate(prompts):
        llm.engine.add_request(str(i), prompt["prompt_token_ids"], params)
    outputs = {}
    while llm.engine.has_unfinished_requests:
        num_victims = len(victims)
        outputs |= {output.request_id: output for output in llm.engine.step()}
        llm.engine.check_integrity()
        if len(victims) > num_victims:
            assert victims[-1].status is SequenceStatus.WAITING
            assert not victims[-1].page_table.blocks
            assert not victims[-1].draft
    assert len(victims) == 3
    assert token_ids([outputs[str(i)] for i in range(6)]) == expected


@pytest.mark.parametrize("lane", ["score", "propose"])
def test_an_error_in_a_lane_is_the_steps_when_both_have_ended(toy_pair, plain, monkeypatch, lane):
    prompts, params = toys.prompts(6), SamplingParams(max_tokens=20, **GREEDY)
    expected = token_ids([generate(plain, prompt, params)[0] for prompt in prompts])
    llm = overlapping(toy_pair)
    step, calls, other_ended = llm.engine.speculative_step, [], threading.Event()
    owners = {"score": step, "propose": step.drafter}
    failing, other = owners[lane], "propose" if lane == "score" else "score"
    honest, honest_other = getattr(failing, lane), getattr(owners[other], other)

    def fails(*arguments, **options):
        calls.append(in_a_lane())
        if calls == [*[False] * calls.count(False), True]:
            raise IntegrityError("a block has two owners")
        return honest(*arguments, **options)

    def ends(*arguments, **options):
        found = honest_other(*arguments, **options)
        if in_a_lane():
            other_ended.set()
        return found

    monkeypatch.setattr(failing, lane, fails)
    monkeypatch.setattr(owners[other], other, ends)
    for i, prompt in enumerate(prompts):
        llm.engine.add_request(str(i), prompt["prompt_token_ids"], params)
    with pytest.raises(IntegrityError, match="two owners"):
        finish(llm.engine)
    assert other_ended.is_set()
    llm.engine.check_integrity()
    assert llm.engine.allocator.num_held == 0  # all begin anew, from their tokens
    assert all(sequence.status is SequenceStatus.WAITING for sequence in llm.engine.scheduler)
    outputs = finish(llm.engine)
    assert token_ids([outputs[str(i)] for i in range(6)]) == expected


def test_a_lane_that_fails_leaves_the_other_ones_error_and_work_alone():
    lanes, done = Lanes(*[FakeModel()] * 2), threading.Event()

    def fail():
        raise KeyError("draft")

    def go_on():
        done.set()
        return 1

    with pytest.raises(KeyError):
        lanes.run(go_on, fail)
    assert done.is_set()
    assert lanes.run(go_on, lambda: 2) == (1, 2)
    with pytest.raises(ZeroDivisionError):  # the first lane's
        lanes.run(lambda: 1 // 0, fail)


class FakeModel:
    device = torch.device("cpu")
    backend = "cpp"
    num_threads = 2


def test_lanes_have_disjoint_cores_where_there_are_two():
    lanes, cores = Lanes(FakeModel(), FakeModel()), os.sched_getaffinity(0)
    of_lanes = lanes.run(lambda: os.sched_getaffinity(0), lambda: os.sched_getaffinity(0))
    assert os.sched_getaffinity(0) == cores  # the host's are as they were
    if len(cores) < 2:
        assert of_lanes == (cores, cores)
        return
    assert not of_lanes[0] & of_lanes[1]
    assert of_lanes[0] | of_lanes[1] <= cores
    assert split_cores(1) is None


def test_a_call_into_our_kernels_leaves_the_interpreter_to_others():
    if why_not(torch.float32) is not None:
        pytest.skip(why_not(torch.float32))
    weight, x, y = linear.pack(torch.randn(1024, 1024)), torch.randn(256, 1024), torch.empty(256, 1024)
    kernel, begun, counts = linear._functions()[torch.float32], threading.Event(), [0]
    arguments = [x.data_ptr(), 1024, 256, weight.data_ptr(), STORAGE[weight.dtype], None, 1024, 1024, y.data_ptr(), 1]

    def call():
        begun.set()
        before = counts[0]
        kernel(*arguments)  # torch's own calls would leave it to others, too
        return counts[0] - before

    found, interval = [], sys.getswitchinterval()
    worker = threading.Thread(target=lambda: found.append(call()))
    try:
        sys.setswitchinterval(1000.0)  # seconds: nobody gives up the interpreter who is not in a call that does
        worker.start()
        while worker.is_alive():
            counts[0] += begun.is_set()
            time.sleep(0)
    finally:
        sys.setswitchinterval(interval)
    worker.join()
    assert found[0] > 0


def test_halves_stay_even_as_sequences_come_and_go(toy_pair):
    llm = overlapping(toy_pair, k=2, max_num_seqs=8)
    engine, rng = llm.engine, random.Random(1)
    prompts = toys.prompts(30)
    for i, prompt in enumerate(prompts):
        lengths = rng.choice([2, 9, 40])
        engine.add_request(str(i), prompt["prompt_token_ids"], SamplingParams(max_tokens=lengths, **GREEDY))
    num_even = num_steps = 0
    while engine.has_unfinished_requests:
        engine.step()
        sizes = engine.scheduler.sizes
        if engine.scheduler.turn is not None:
            num_steps += 1
            num_even += abs(sizes[0] - sizes[1]) <= 1
    assert num_steps > 20
    assert num_even > 0.8 * num_steps  # some have ended since halves were made even
    assert engine.scheduler.num_moved > 0


def test_one_sequence_and_nobody_who_drafts_take_the_sequential_step(toy_pair):
    prompts, params = toys.prompts(4), SamplingParams(max_tokens=20, **GREEDY)
    llm = overlapping(toy_pair)
    generate(llm, prompts[:1], params)
    assert llm.metrics.overlapped_steps == 0
    plainly = overlapping(toy_pair, speculative={"num_speculative_tokens": 0})
    assert generate(plainly, prompts, params)
    assert plainly.metrics.overlapped_steps == 0


def test_auto_goes_by_halves_where_its_choice_says_so(toy_pair, plain, monkeypatch):
    prompts, params = toys.prompts(8), SamplingParams(max_tokens=40, **GREEDY)
    expected = token_ids([generate(plain, prompt, params)[0] for prompt in prompts])
    llm = overlapping(toy_pair, schedule="auto", k=2)
    choice, heard = llm.engine.choice, []
    monkeypatch.setattr(choice, "by_halves", lambda num_seqs: num_seqs > 4)
    monkeypatch.setattr(choice, "heard", lambda num_seqs, stint: heard.append((num_seqs, stint)))
    assert token_ids(generate(llm, prompts, params)) == expected
    assert llm.metrics.overlapped_steps > 0
    assert {num_seqs > 4 for num_seqs, stint in heard if stint.by_halves} == {True}
    assert all(stint.num_rounds <= (num_seqs + 1) // 2 + 1 for num_seqs, stint in heard if stint.by_halves)
    assert all(stint.seconds >= max(stint.verify_seconds, stint.draft_seconds) for _, stint in heard)


def test_a_controller_hears_of_no_pass_that_ran_beside_another_and_knows_which_plans_do(toy_pair):
    llm = overlapping(toy_pair)
    engine, whim, planned, heard = llm.engine, Whim(3), [], []
    whim.costs = SimpleNamespace(overlaps=False)
    engine.speculative_step.planner = DraftPlanner(whim)
    honest = whim.plan

    def plan(*arguments):
        planned.append((engine.scheduler.turn is not None, whim.costs.overlaps))
        return honest(*arguments)

    whim.plan = plan
    for name in ("observe_target", "observe_proposal", "observe_rest"):
        setattr(whim, name, lambda *_: heard.append(engine.scheduler.turn))
    generate(llm, toys.prompts(8), SamplingParams(max_tokens=60, **GREEDY))
    assert set(planned) == {(False, False), (True, True)}
    assert set(heard) == {None}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schedule": "halves"}, "schedule='halves' is not known; allowed: 'continuous', .*, 'overlap', 'auto'"),
        ({"rollback": "repad"}, "schedule='overlap' changes page tables between two passes alone; rollback='repad'"),
        ({"device_round": True}, "device_round=True leaves drafts and verification to one call"),
        ({"k": 0}, "schedule='overlap' hides drafting, and nobody drafts"),
        (
            {"speculative": {"model": None, "method": "ngram", "device": "cpu:0"}},
            r"speculative_config\['device'\]='cpu:0' is for method 'draft_model' alone; method='ngram'",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(toy_pair, arguments, message):
    with pytest.raises(ValueError, match=message):
        make_llm(toy_pair, **({"schedule": "overlap"} | arguments))
