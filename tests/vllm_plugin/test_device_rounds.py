"""Rounds that are the device's, under asynchronous scheduling: on the kernels' references, copies logged."""

from __future__ import annotations

import threading

import pytest
import torch

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from vllm.v1.outputs import AsyncModelRunnerOutput  # noqa: E402

from specpaged.config import EMBEDDED_TARGET  # noqa: E402
from specpaged.engine.device_batch import Member  # noqa: E402
from specpaged.engine.device_commit import Flight  # noqa: E402
from specpaged.modeling import device_round  # noqa: E402
from specpaged.modeling.copies import Copies  # noqa: E402
from specpaged.paging.block_allocator import IntegrityError  # noqa: E402
from specpaged.vllm_plugin.device_rounds import RoundOutput  # noqa: E402
from tests.engine.test_decisions import Whim, planner_of  # noqa: E402
from tests.kernels import references  # noqa: E402
from tests.kernels.test_device_engine import LoggedCopies, costs_at_plans  # noqa: E402
from tests.vllm_plugin.serving import check_nothing_is_held, core, model_runner, token_ids  # noqa: E402

ON_DEVICE = {"adaptive": False, "attention_backend": "triton", "device_round": True, "draft_numerics": "exact"}
PROMPTS = [{"prompt_token_ids": ids} for ids in ([5, 9, 2, 7] * 5, [7, 1, 30], [3] * 17, [8, 2, 44, 6])]


@pytest.fixture(scope="module", autouse=True)
def _references():
    with pytest.MonkeyPatch.context() as monkeypatch:
        references.put_in_place(monkeypatch)
        yield


@pytest.fixture
def make_device(make_vllm, asynchronous, tokenizer_pair):
    """Engines on a toy pair whose steps are planned ahead, and are the device's where they can be."""

    def make(k=3, model=tokenizer_pair.draft, adaptive=False, **arguments):
        options = ON_DEVICE | {"adaptive": adaptive}
        if k:
            draft = {"method": "draft_model", "model": model, "num_speculative_tokens": k}
            arguments["speculative_config"] = draft
        else:
            del options["draft_numerics"]
        defaults = {"model": tokenizer_pair.target, "max_model_len": 96, "kv_cache_memory_bytes": 1 << 20}
        return make_vllm(additional_config={"specpaged": options}, **(defaults | arguments))

    return make


@pytest.fixture
def plain(make_vllm, tokenizer_pair):
    """The toy's own output, of vLLM's synchronous scheduling and our kernels on a CPU."""
    return make_vllm(model=tokenizer_pair.target, max_model_len=96, kv_cache_memory_bytes=1 << 20)


def params(**given):
    return vllm.SamplingParams(**({"temperature": 0, "max_tokens": 11, "ignore_eos": True} | given))


MIXED = [
    params(),
    params(temperature=0.8, seed=3, max_tokens=6),
    params(max_tokens=2),
    params(temperature=1.0, seed=5, max_tokens=17),
]


def generate(llm, given=MIXED, prompts=PROMPTS):
    return token_ids(llm.generate(prompts, given, use_tqdm=False))


@pytest.mark.parametrize(
    ("k", "arguments"),
    [(0, {}), (3, {}), (3, {"max_num_batched_tokens": 24, "max_num_seqs": 3}), (3, {"enable_prefix_caching": True})],
    ids=str,
)
def test_outputs_are_those_of_plain_decoding(make_device, plain, k, arguments):
    llm = make_device(k, **arguments)
    rounds = model_runner(llm).rounds
    for _ in range(2):
        assert generate(llm) == generate(plain)
        check_nothing_is_held(llm)
    metrics = model_runner(llm).metrics
    assert metrics.steps > sum(rounds.host_steps.values())
    assert set(rounds.host_steps) <= {"prefill", "nobody runs"}
    assert not k or 0 < metrics.accepted_tokens < metrics.draft_tokens


def test_outputs_do_not_depend_on_what_is_decided_for_each_sequence_in_each_round(make_device, plain, monkeypatch):
    """Of as many drafts as vLLM has lent slots for."""
    llm = make_device(3, adaptive=True)
    rounds, step = model_runner(llm).rounds, model_runner(llm).speculative_step
    controller = step.planner.controller
    assert not controller.looks_back
    hides_host = costs_at_plans(controller)
    assert generate(llm) == generate(plain)
    assert any(hides_host), "who decides knows who runs the rounds"
    launched, launch = [], rounds.round.launch
    monkeypatch.setattr(rounds.round, "launch", lambda bucket: launched.append(bucket) or launch(bucket))
    for seed in range(3):
        whim = Whim(seed, looks_back=False)
        monkeypatch.setattr(step, "planner", planner_of(whim))
        assert generate(llm) == generate(plain)
        check_nothing_is_held(llm)
        assert whim.outcomes
    assert {bucket.num_drafts for bucket in launched} == {0, 1, 2, 3}


def test_who_stops_in_the_middle_of_a_round_has_nothing_behind_it(make_device, plain):
    """vLLM finds the stop when the next round runs already; that round's tokens are nobody's."""
    llm, whole = make_device(), generate(plain, params(max_tokens=20))
    for position in (0, 3, 4, 9):
        given = [params(max_tokens=20, stop_token_ids=[ids[position]]) for ids in whole]
        assert generate(llm, given) == generate(plain, given)
        check_nothing_is_held(llm)


def test_who_asks_for_what_the_host_does_is_in_no_round_of_the_devices(make_device, plain):
    llm = make_device()
    rounds = model_runner(llm).rounds
    before = rounds.host_steps.copy()
    given = [params(), params(logprobs=1), params(temperature=1.0, seed=2, top_k=4), params(max_tokens=20)]
    assert generate(llm, given) == generate(plain, given)
    assert {"logprobs", "processing"} & (rounds.host_steps - before).keys()
    check_nothing_is_held(llm)


def test_preempted_sequences_go_on_where_they_were(make_device, plain):
    """Ten blocks for four sequences that want six each: who has to go has a round in flight."""
    llm = make_device(num_gpu_blocks_override=13)
    given = params(max_tokens=70)
    preempted = []
    scheduler = core(llm).scheduler
    preempt = scheduler._preempt_request
    scheduler._preempt_request = lambda *a, **named: (preempted.append(a), preempt(*a, **named))[1]
    try:
        assert generate(llm, given) == generate(plain, given)
    finally:
        scheduler._preempt_request = preempt
    assert preempted
    check_nothing_is_held(llm)


def test_who_sits_a_step_out_is_given_the_tokens_of_its_last_round_before(make_device, plain, monkeypatch):
    """Every third step has room for seven tokens: for four of the first sequence and three of the second."""
    llm = make_device()
    rounds, scheduler = model_runner(llm).rounds, core(llm).scheduler
    run, schedule, most = rounds.run, scheduler.schedule, scheduler.max_num_scheduled_tokens
    came, num_steps = [], 0

    def scheduled_short(*args, **named):
        nonlocal num_steps
        num_steps += 1
        scheduler.max_num_scheduled_tokens = most if num_steps % 3 else 7
        return schedule(*args, **named)

    def watched(entries, scheduled):
        in_flight = {member.sequence for member in rounds.flight.members} if rounds.flight else set()
        owed = (rounds.batch.members.keys() & in_flight) - {entry.sequence for entry in entries}
        before = {sequence: sequence.num_tokens for sequence in owed}
        output = run(entries, scheduled)
        came.extend(sequence.num_tokens - num_tokens for sequence, num_tokens in before.items())
        return output

    monkeypatch.setattr(rounds, "run", watched)
    monkeypatch.setattr(scheduler, "schedule", scheduled_short)
    given = [params(max_tokens=20 + i) for i in range(4)]
    try:
        assert generate(llm, given) == generate(plain, given)
    finally:
        scheduler.max_num_scheduled_tokens = most
    assert came
    assert min(came) > 0
    check_nothing_is_held(llm)


def test_tokens_are_of_the_row_that_a_sequence_had_in_the_round():
    """It has another one by the time that somebody reads them."""
    reading = Copies().read(torch.tensor([[9, 0, 0, 0, 0, 70, 71], [1, 0, 1, 0, 1, 80, 0], [2, 1, 1, 0, 1, 90, 91]]))
    member = Member(type("Named", (), {"request_id": "a"})(), 0, None)
    output = RoundOutput(Flight([member], [2], [True], reading)).get_output()
    assert (output.req_ids, output.sampled_token_ids) == (["a"], [[90, 91]])


def test_a_step_is_launched_before_the_one_before_it_is_read(make_device):
    """In a steady round: one read, of which another thread may have the tokens; this one waits for the round before."""
    llm = make_device()
    runner = model_runner(llm)
    rounds = runner.rounds
    log, copies = LoggedCopies(), (rounds.copies, rounds.batch.state._copies)
    launch, outputs = rounds.round.launch, []
    rounds.copies = rounds.batch.state._copies = log
    rounds.round.launch = lambda bucket: (log.events.append("launch"), launch(bucket))[1]
    sample = runner.sample

    def watched(grammar):
        output = sample(grammar)
        if isinstance(output, AsyncModelRunnerOutput):
            log.events.append("returned")
            get_output = output.get_output

            def in_another_thread():
                found = []
                thread = threading.Thread(target=lambda: found.append(get_output()))
                thread.start()
                thread.join()
                outputs.append(found[0])
                return found[0]

            output.get_output = in_another_thread
        return output

    runner.sample = watched
    try:
        generate(llm, params(max_tokens=24), PROMPTS[:2])
    finally:
        rounds.copies, rounds.batch.state._copies = copies
        rounds.round.launch, runner.sample = launch, sample
    events = [event for event in log.events if event != "upload"]
    first = events.index("read 3")
    assert events[first - 1 : first + 4] == ["launch", "read 3", "wait 2", "returned", "wait 2"]
    assert log.events.count("upload") < log.num_reads  # of blocks alone
    assert all(ids for output in outputs for ids in output.sampled_token_ids[:1])


def test_who_has_no_token_gets_its_end(make_device, monkeypatch):
    """vLLM cannot fail a request: a row without a token is said to be one, and others are as they were."""
    llm = make_device()
    expected = generate(llm, params(), PROMPTS[:2])
    settle, calls = device_round.settle_round, []

    def spoil(rows, sampled, ok, cu_rows, *rest):
        calls.append(0)
        if len(calls) == 2:
            ok = ok.clone()
            ok[: int(cu_rows[1])] = False
        settle(rows, sampled, ok, cu_rows, *rest)

    monkeypatch.setattr(device_round, "settle_round", spoil)
    ended = generate(llm, params(ignore_eos=False), PROMPTS[:2])
    assert ended[0][-1] == 0  # the toy's end of text
    assert ended[0][:-1] == expected[0][: len(ended[0]) - 1]
    assert len(ended[0]) < 11
    assert ended[1] == expected[1]
    check_nothing_is_held(llm)


def test_what_rounds_would_hold_is_held_against_the_host(make_device):
    llm = make_device()
    generate(llm)
    runner = model_runner(llm)
    runner.check_integrity()
    runner.rounds.batch.state.fields["limits"][-1] = 9
    with pytest.raises(IntegrityError, match="is nobody's"):
        runner.check_integrity()
    runner.rounds.batch.state.fields["limits"][-1] = 0


def test_rounds_go_on_with_weights_that_are_loaded_anew(make_device):
    llm = make_device()
    expected, before = generate(llm), model_runner(llm).rounds
    llm.collective_rpc("reload_weights")
    rounds = model_runner(llm).rounds
    assert rounds is not before
    assert rounds.round.target is model_runner(llm).speculative_step.target is not before.round.target
    assert generate(llm) == expected
    assert model_runner(llm).metrics.steps > sum(rounds.host_steps.values())
    check_nothing_is_held(llm)


def test_rounds_need_steps_that_are_planned_ahead(make_vllm):
    """Without, vLLM asks for each step's drafts, which no round gives away."""
    config = {"specpaged": {"attention_backend": "triton", "device_round": True}}
    with pytest.raises(ValueError, match=r"device_round'\]=True needs asynchronous scheduling"):
        make_vllm(additional_config=config, model=EMBEDDED_TARGET)
