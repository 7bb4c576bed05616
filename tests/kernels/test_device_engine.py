"""An engine whose rounds the device runs by itself, with the host one round late. On the kernels' references."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from specpaged import LLM, SamplingParams
from specpaged.modeling import device_round
from specpaged.modeling.copies import Copies, Reading
from specpaged.paging.block_allocator import OutOfBlocksError
from tests import toys
from tests.engine.test_decisions import with_whim
from tests.kernels import references
from tests.kernels.test_cuda_graphs import Kept

MAX_MODEL_LEN, BLOCK_SIZE = 96, 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, seed=3, max_tokens=6, ignore_eos=True)
PROMPTS = toys.prompts(3, seed=5, longest=24)
WHOLE: dict[tuple[int, float], list] = {}


@pytest.fixture(scope="module", autouse=True)
def _references():
    with pytest.MonkeyPatch.context() as monkeypatch:
        references.put_in_place(monkeypatch)
        yield


def make(pair: toys.Pair, k: int = 2, device_round: bool = True, speculative=None, **arguments) -> LLM:
    speculative = speculative or {"model": pair.draft, "num_speculative_tokens": k}
    defaults = {"max_num_seqs": 3, "max_num_batched_tokens": 32, "attention_backend": "triton"}
    return LLM(
        pair.target,
        speculative_config=speculative if k else None,
        device_round=device_round,
        max_model_len=MAX_MODEL_LEN,
        **(defaults | arguments),
    )


def generate(llm: LLM, prompts, params, may_fail: bool = False):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.engine.check_integrity()
    assert llm.engine.allocator.num_held == 0
    assert [output.error for output in outputs] == [None] * len(outputs)
    assert getattr(llm.engine, "_never", None) != "a round failed" or may_fail
    return [[(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def plain(tokenizer_pair, _references):
    return make(tokenizer_pair, k=0, device_round=False)


@pytest.fixture(scope="module", params=[True, False], ids=["synchronous", "late"])
def device_llm(request, tokenizer_pair, _references):
    return make(tokenizer_pair, 3, synchronous=request.param, enable_prefix_caching=True)


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("k", [0, 2])
def test_outputs_are_those_of_plain_decoding(tokenizer_pair, plain, k, synchronous):
    params = [GREEDY, SAMPLED, GREEDY]
    llm = make(tokenizer_pair, k, synchronous=synchronous)
    assert generate(llm, PROMPTS, params) == generate(plain, PROMPTS, params)
    assert llm.metrics.steps > sum(llm.engine.host_steps.values())
    assert not k or 0 < llm.metrics.accepted_tokens < llm.metrics.draft_tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["token", "eos", "length", "string"])
def test_nothing_comes_behind_a_stop(device_llm, plain, kind, temperature, monkeypatch):
    """At any position of any round, of up to four tokens: it is not emitted, and not counted."""
    for position in range(9):
        prompts = [PROMPTS[position % 3], PROMPTS[(position + 1) % 3]]
        (token_ids, text, *_), mate = whole_outputs(plain, position % 3, temperature)
        stop = {
            "token": {"stop_token_ids": [token_ids[position]]},
            "eos": {"ignore_eos": False},
            "length": {"max_tokens": position + 1},
            "string": {"stop": [text[position : position + 2] or text[:1] or "none"]},
        }[kind]
        if kind == "eos":
            for llm in (plain, device_llm):
                own = replace(llm.engine.vocabulary, eos_token_ids=(token_ids[position],))
                monkeypatch.setattr(llm.engine, "vocabulary", own)
        params = replace(whole_params(temperature), **stop)
        expected = [generate(plain, prompts[0], params)[0], [mate]]
        assert kind == "string" or len(expected[0][0][0]) <= position + 1
        before = device_llm.metrics.emitted_tokens
        assert generate(device_llm, prompts, [params, whole_params(temperature)]) == expected
        emitted = [completion[0] for output in expected for completion in output]
        assert device_llm.metrics.emitted_tokens - before == sum(map(len, emitted))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_comes_behind_an_abort(device_llm, plain, temperature):
    """As soon as the host has read so many tokens: whatever else a round has brought is nobody's."""
    engine = device_llm.engine
    for position in range(9):  # it may have three more
        (token_ids, *_), mate = whole_outputs(plain, position % 3, temperature)
        for i in range(2):
            prompt = PROMPTS[(position + i) % 3]["prompt_token_ids"]
            engine.add_request(str(i), prompt, whole_params(temperature))
        before = engine.metrics.emitted_tokens
        while len(engine.requests["0"].sequences[0].output_token_ids) <= position:
            engine.step()
        aborted = engine.abort_request("0").outputs[0].token_ids
        outputs = []
        while engine.has_unfinished_requests:
            outputs += engine.step()
        engine.check_integrity()
        assert aborted == token_ids[: len(aborted)]
        assert [output.request_id for output in outputs] == ["1"]
        assert outputs[0].outputs[0].token_ids == mate[0]
        assert engine.metrics.emitted_tokens - before == len(aborted) + len(mate[0])
        assert engine.allocator.num_held == 0


def whole_params(temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=7, max_tokens=14, ignore_eos=True)


def whole_outputs(plain, which: int, temperature: float) -> list[tuple]:
    """What comes without a stop, of a prompt and of the one behind it."""
    if (which, temperature) not in WHOLE:
        prompts = [PROMPTS[which], PROMPTS[(which + 1) % 3]]
        WHOLE[which, temperature] = [output[0] for output in generate(plain, prompts, whole_params(temperature))]
    return WHOLE[which, temperature]


@pytest.mark.parametrize("synchronous", [True, False])
def test_who_outlives_the_others_does_not_run_in_their_bucket(tokenizer_pair, plain, synchronous):
    """The last of three by row. Nobody runs in more rows than it takes."""
    llm = make(tokenizer_pair, 2, synchronous=synchronous)
    launch, launched = llm.engine.round.launch, []
    running = llm.engine.scheduler.running
    llm.engine.round.launch = lambda bucket: launched.append((len(running), bucket.num_seqs)) or launch(bucket)
    params = [SamplingParams(temperature=0.8, seed=3, max_tokens=n, ignore_eos=True) for n in (3, 6, 30)]
    assert generate(llm, PROMPTS, params) == generate(plain, PROMPTS, params)
    assert [num_seqs for _, num_seqs in launched] == sorted((n for _, n in launched), reverse=True)
    assert {num_seqs for _, num_seqs in launched} == {3, 2, 1}
    assert all(num_seqs <= max(1, num_running) for num_running, num_seqs in launched)


def test_drafts_of_the_hosts_are_kept_where_a_round_finds_no_blocks(tokenizer_pair, plain):
    """Its step is the host's then, which verifies what was drafted before."""
    llm = make(tokenizer_pair, 3)
    engine = llm.engine
    for i, prompt in enumerate(PROMPTS[:2]):
        engine.add_request(str(i), prompt["prompt_token_ids"], GREEDY_9)
    while not all(request.sequences[0].draft for request in engine.requests.values()):
        engine.step()  # on the host: prefills, behind which it drafts
    num_drafted = sum(len(sequence.draft) for sequence in engine.scheduler.running)
    assert engine._flight is None
    table, asked = type(engine.scheduler.running[0].page_table), []
    reserve, before = table.reserve, engine.metrics.draft_tokens

    def fail_for_the_second(*of):
        asked.append(of)
        if len(asked) == 2:
            raise OutOfBlocksError("no block is free")
        return reserve(*of)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(table, "reserve", fail_for_the_second)
        engine.step()
    assert engine.host_steps["no blocks"] == 1
    assert engine.metrics.draft_tokens == before + num_drafted > before
    outputs = {}
    while engine.has_unfinished_requests:
        outputs |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
    expected = generate(plain, PROMPTS[:2], GREEDY_9)
    assert [outputs[str(i)] for i in range(2)] == [output[0][0] for output in expected]


@pytest.mark.parametrize("synchronous", [True, False])
def test_nobody_finds_in_the_cache_what_came_behind_a_stop(tokenizer_pair, plain, synchronous):
    """As soon as a block of the run is full, the sequence has ended in it, or behind it."""
    prompt, whole = PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    token_ids = generate(plain, prompt, whole)[0][0][0]
    everything = prompt["prompt_token_ids"] + token_ids
    llm = make(tokenizer_pair, 3, synchronous=synchronous, enable_prefix_caching=True)
    engine, longest = llm.engine, 0
    for num_tokens in (5, 12, 18, 25):
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop_token_ids=[token_ids[num_tokens]])
        emitted = generate(llm, prompt, params)[0][0][0]
        longest = max(longest, len(prompt["prompt_token_ids"]) + len(emitted))
        blocks, _ = engine.prefix_cache.match(everything, len(everything), engine.num_pools)
        assert len(blocks) * BLOCK_SIZE <= longest
        for block in blocks:
            engine.allocator.free(block)
        engine.check_integrity()
    assert generate(llm, prompt, whole)[0][0][0] == token_ids


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 6])
def test_an_abort_ends_a_request_with_what_the_host_has_read(tokenizer_pair, plain, num_steps, synchronous):
    whole = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    expected = generate(plain, PROMPTS[:2], whole)
    engine = make(tokenizer_pair, 2, synchronous=synchronous).engine
    for i, prompt in enumerate(PROMPTS[:2]):
        engine.add_request(str(i), prompt["prompt_token_ids"], whole)
    for _ in range(num_steps):
        engine.step()
    aborted = engine.abort_request("0").outputs[0]
    assert aborted.token_ids == expected[0][0][0][: len(aborted.token_ids)]
    before = engine.metrics.emitted_tokens
    num_read = len(engine.requests["1"].sequences[0].output_token_ids)
    outputs = []
    while engine.has_unfinished_requests:
        outputs += engine.step()
        engine.check_integrity()
    assert [output.request_id for output in outputs] == ["1"]
    assert outputs[0].outputs[0].token_ids == expected[1][0][0]
    assert engine.metrics.emitted_tokens - before == 20 - num_read
    assert engine.allocator.num_held == 0


class LoggedCopies(Copies):
    """Says what goes up, what is asked for, and for what somebody waits."""

    def __init__(self):
        self.events: list[str] = []
        self.num_reads = 0

    def upload(self, values):
        self.events.append("upload")
        return super().upload(values)

    def read(self, source):
        number, events, reading = self.num_reads, self.events, super().read(source)
        self.num_reads += 1
        events.append(f"read {number}")

        class Logged(Reading):
            def values(self):
                events.append(f"wait {number}")
                return reading.values()

        return Logged()


class Operations(TorchDispatchMode):
    """Notes what torch is asked for, but for what is asked for within `unseen` functions."""

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []
        self._depth = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self._depth:
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))

    def unseen(self, function):
        def run(*args):
            self._depth += 1
            try:
                return function(*args)
            finally:
                self._depth -= 1

        return run


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("synchronous", [True, False])
def test_a_steady_round_uploads_nothing_and_waits_for_the_round_before(tokenizer_pair, synchronous, temperature):
    """One read in a round, of the round before; an upload only where a sequence has come by a block. And beside the
    round, the copy and what it brings up there is no operation at all that a device could have to be waited for."""
    engine = make(tokenizer_pair, 2, synchronous=synchronous, max_num_seqs=2).engine
    operations, state = Operations(), engine.batch.state
    engine.copies = state._copies = log = LoggedCopies()
    launch = engine.round.launch
    engine.round.launch = operations.unseen(lambda bucket: (log.events.append("launch"), launch(bucket))[1])
    log.read, state.flush = operations.unseen(log.read), operations.unseen(state.flush)
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=40, ignore_eos=True)
    for i, prompt in enumerate(PROMPTS[:2]):
        engine.add_request(str(i), prompt["prompt_token_ids"], params)
    while log.num_reads < 2:
        engine.step()
    host_steps = engine.host_steps.copy()
    sequences = [engine.requests[str(i)].sequences[0] for i in range(2)]
    num_quiet = 0
    for _ in range(8):
        blocks = [list(sequence.page_table.blocks) for sequence in sequences]
        log.events.clear()
        with operations:
            engine.step()
        assert engine.host_steps == host_steps
        changed = blocks != [sequence.page_table.blocks for sequence in sequences]
        last = log.num_reads - 1
        of_round = ["launch", f"read {last}", f"wait {last if synchronous else last - 1}"]
        assert log.events == ["upload"] * changed + of_round
        num_quiet += not changed
    assert num_quiet > 3
    # As a list what was read is the host's.
    assert operations.seen
    assert {*operations.seen} <= {"aten.resolve_conj.default", "aten.resolve_neg.default"}


def test_captured_rounds_are_replayed_for_whoever_runs(tokenizer_pair, plain, monkeypatch):
    """One, two and three sequences, with other K and other contexts, over the same buffers: a graph for each bucket.

    Attention is split every 16 tokens, so that contexts outgrow buckets while their sequences run.
    """
    honest = device_round.choose_tiles
    monkeypatch.setattr(device_round, "choose_tiles", lambda *of: replace(honest(*of), split_len=16))
    llm = make(tokenizer_pair, 2)
    kept = llm.engine.round._record = Kept()
    launch, buckets = llm.engine.round.launch, []
    llm.engine.round.launch = lambda bucket: buckets.append(bucket) or launch(bucket)
    own = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, extra_args={"num_speculative_tokens": 1})
    for count, params in ((1, [GREEDY]), (2, [GREEDY, own]), (3, [GREEDY_30, own, SAMPLED]), (2, [own, GREEDY])):
        expected = generate(plain, PROMPTS[:count], [p if p is not own else GREEDY_9 for p in params])
        assert generate(llm, PROMPTS[:count], params) == expected
    assert 3 <= kept.num_captured == llm.engine.round.num_captured < kept.num_replayed
    assert len({bucket.target_items for bucket in buckets if bucket.num_seqs == 1}) > 2
    assert llm.metrics.accepted_tokens > 0


@pytest.mark.parametrize("synchronous", [True, False])
def test_the_likeliest_drafts_of_a_batch_are_verified_and_outputs_are_those_of_plain_decoding(
    tokenizer_pair, plain, synchronous, monkeypatch
):
    """TETRIS: one draft for each sequence, of three; the target's pass has no row for more of them."""
    passes, pack = [], device_round.pack

    def watched(token_ids, starts, ends, num_logits, table, block_size, num_rows, *rest):
        passes.append(((ends - starts).tolist(), num_rows))
        return pack(token_ids, starts, ends, num_logits, table, block_size, num_rows, *rest)

    monkeypatch.setattr(device_round, "pack", watched)
    tetris = {"num_speculative_tokens": 1, "selection": "tetris", "tetris_extra_proposals": 2}
    llm = make(tokenizer_pair, 1, synchronous=synchronous, speculative=tetris | {"model": tokenizer_pair.draft})
    params = [GREEDY_9, SamplingParams(temperature=0.8, seed=3, max_tokens=9, ignore_eos=True), GREEDY_9]
    assert generate(llm, PROMPTS, params) == generate(plain, PROMPTS, params)
    assert generate(llm, PROMPTS, GREEDY) == generate(plain, PROMPTS, GREEDY)  # else the argmax would be enough
    of_target = passes[3::4]  # behind three of the draft
    assert all(sum(lens) <= 2 * sum(map(bool, lens)) <= num_rows for lens, num_rows in of_target)
    assert {max(lens) for lens, _ in of_target} >= {2, 3}
    assert {num_rows for lens, num_rows in of_target if len(lens) > 2} <= {6, 8}  # of 3 or 4 sequences
    metrics = llm.metrics
    assert metrics.proposed_tokens > metrics.draft_tokens >= metrics.accepted_tokens > 0
    assert metrics.steps > sum(llm.engine.host_steps.values())


@pytest.mark.parametrize("synchronous", [True, False])
def test_outputs_do_not_depend_on_what_is_decided_for_each_sequence_in_each_round(tokenizer_pair, plain, synchronous):
    """K of each by chance, none of some: their KV of the draft falls behind, and is caught up with."""
    auto = {"model": tokenizer_pair.draft, "num_speculative_tokens": "auto", "max_num_speculative_tokens": 3}
    llm = make(tokenizer_pair, 3, synchronous=synchronous, speculative=auto)
    params = [GREEDY_30, SamplingParams(temperature=0.8, seed=3, max_tokens=30, ignore_eos=True), GREEDY_30]
    expected = generate(plain, PROMPTS, params)
    launched, launch = set(), llm.engine.round.launch
    llm.engine.round.launch = lambda bucket: launched.add(bucket.num_drafts) or launch(bucket)
    for seed in range(2):
        whim = with_whim(llm, seed, looks_back=False)
        assert generate(llm, PROMPTS, params) == expected
        assert len(whim.outcomes) > 10
    assert launched == {0, 1, 2, 3}
    assert set(llm.engine.host_steps) <= {"admission", "prefill", "nobody runs"}


def test_how_much_is_drafted_is_decided_by_what_has_stood_in_rounds_before(tokenizer_pair, plain):
    """Of a draft that is the target itself everything stands; of another one, too little."""
    longest = {}
    for draft in (tokenizer_pair.target, tokenizer_pair.draft):
        auto = {"model": draft, "num_speculative_tokens": "auto", "max_num_speculative_tokens": 4, "numerics": "exact"}
        llm = make(tokenizer_pair, 4, speculative=auto)
        controller = llm.engine.speculative_step.planner.controller
        assert (controller.looks_back, controller.stops, controller.is_timed) == (False, False, False)
        costs, before = controller.costs, controller.acceptance.mean
        hides_host = costs_at_plans(controller)
        costs.draft.seconds = [0.02 * seconds for seconds in costs.target.seconds]  # so that it is tried
        assert generate(llm, PROMPTS, GREEDY_30) == generate(plain, PROMPTS, GREEDY_30)
        assert llm.metrics.steps > sum(llm.engine.host_steps.values())
        assert llm.metrics.draft_tokens > 0
        assert any(hides_host), "who decides knows who runs the rounds"
        longest[draft] = controller.acceptance.mean - before
    assert longest[tokenizer_pair.target] > 0 > longest[tokenizer_pair.draft]


def costs_at_plans(controller) -> list[bool]:
    """Of each plan to come, whether what a host does is taken to be hidden behind a device's rounds."""
    plan, hides_host = controller.plan, []
    controller.plan = lambda *arguments: hides_host.append(controller.costs.hides_host) or plan(*arguments)
    return hides_host


GREEDY_30 = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
GREEDY_9 = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)


def test_what_cannot_be_captured_runs_all_the_same(tokenizer_pair, plain, caplog):
    def fail(run):
        run()
        raise RuntimeError("no room for a graph")

    llm = make(tokenizer_pair, 2)
    llm.engine.round._record = fail
    assert generate(llm, PROMPTS, GREEDY) == generate(plain, PROMPTS, GREEDY)
    assert llm.engine.round.num_captured == 0
    assert "run eagerly: no room for a graph" in caplog.text


@pytest.mark.parametrize("synchronous", [True, False])
def test_a_row_without_a_token_is_looked_into_by_the_host_and_drafts_no_more(
    tokenizer_pair, plain, synchronous, monkeypatch
):
    """As where NaN in a draft's KV spoils the rows before it: it passes without drafts, and nobody else is touched."""
    settle, calls = device_round.settle_round, []

    def spoil(rows, sampled, ok, cu_rows, *rest):
        calls.append(0)
        if len(calls) == 2:
            ok = ok.clone()
            ok[: int(cu_rows[1])] = False
        settle(rows, sampled, ok, cu_rows, *rest)

    monkeypatch.setattr(device_round, "settle_round", spoil)
    llm = make(tokenizer_pair, 2, synchronous=synchronous)
    assert generate(llm, PROMPTS, GREEDY) == generate(plain, PROMPTS, GREEDY)
    assert llm.metrics.requests_without_drafts == 1
    assert llm.engine.host_steps["no token"] == 1


def test_nan_in_a_sequences_kv_is_its_requests_error_alone(tokenizer_pair, plain):
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    expected = generate(plain, PROMPTS, params)
    engine = make(tokenizer_pair, 2).engine
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt["prompt_token_ids"], params)
    while engine._flight is None:
        engine.step()
    victim = engine.requests["1"].sequences[0]
    engine.target.kv_cache.layers[0][victim.page_table.blocks[0] * BLOCK_SIZE] = float("nan")
    outputs = {}
    while engine.has_unfinished_requests:
        outputs |= {output.request_id: output for output in engine.step()}
    assert "hold NaN" in outputs["1"].error
    for i in (0, 2):
        assert outputs[str(i)].outputs[0].token_ids == expected[i][0][0]
    assert engine.allocator.num_held == 0


def test_a_round_that_fails_is_the_last(tokenizer_pair, plain):
    llm = make(tokenizer_pair, 2)
    launch, calls = llm.engine.round.launch, []

    def fail(bucket):
        calls.append(bucket)
        if len(calls) == 3:
            raise RuntimeError("the device is gone")
        return launch(bucket)

    llm.engine.round.launch = fail
    assert generate(llm, PROMPTS, GREEDY, may_fail=True) == generate(plain, PROMPTS, GREEDY)
    assert len(calls) == 3
    assert llm.engine.host_steps["a round failed"] > 0
    assert llm.metrics.failed_steps == 1


def test_a_round_that_cannot_be_read_is_run_anew_by_the_host(tokenizer_pair, plain):
    """It was in flight when somebody came: all go on from the tokens that the host has, in rounds of the device's."""
    expected = generate(plain, PROMPTS, GREEDY_9)
    engine = make(tokenizer_pair, 2).engine

    def fail():
        raise RuntimeError("the device is gone")

    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt["prompt_token_ids"], GREEDY_9)
        if i == 1:
            while engine.metrics.emitted_tokens < 6:
                engine.step()
            engine._flight.reading.values = fail
    outputs = {}
    while engine.has_unfinished_requests:
        outputs |= {output.request_id: output for output in engine.step()}
        engine.check_integrity()
    assert [outputs[str(i)].outputs[0].token_ids for i in range(3)] == [output[0][0] for output in expected]
    assert engine.metrics.failed_steps == 1
    assert "a round failed" not in engine.host_steps


@pytest.mark.parametrize(
    ("speculative", "reason"),
    [
        ({"method": "ngram", "num_speculative_tokens": 2}, "drafter"),
        ({"num_speculative_tokens": "auto", "kv_window": 64}, "blocks of the draft's own"),
        ({"num_speculative_tokens": 2, "verification": "rejection"}, "rejection"),
        ({"num_speculative_tokens": 2, "kv_window": 64}, "blocks of the draft's own"),
    ],
)
def test_what_the_device_does_not_cover_is_the_hosts(tokenizer_pair, plain, speculative, reason):
    model = {} if "method" in speculative else {"model": tokenizer_pair.draft}
    llm = make(tokenizer_pair, 2, speculative=speculative | model)
    assert generate(llm, PROMPTS[:2], GREEDY) == generate(plain, PROMPTS[:2], GREEDY)
    assert set(llm.engine.host_steps) == {reason}
    if speculative["num_speculative_tokens"] == "auto":  # who decides does not think that a device runs them
        planner = llm.engine.speculative_step.planner
        assert planner.controller.looks_back
        assert not planner._is_late


@pytest.mark.parametrize("method", ["eagle3", "clover"])
def test_rounds_of_heads_are_the_hosts(target, heads, method):
    def outputs(**arguments):
        llm = LLM(target[0], attention_backend="triton", max_model_len=MAX_MODEL_LEN, **arguments)
        return generate(llm, PROMPTS[:2], [GREEDY, SAMPLED]), llm

    speculative = {"method": method, "model": heads[method], "num_speculative_tokens": 2}
    got, llm = outputs(speculative_config=speculative, device_round=True)
    assert got == outputs()[0]
    assert len(llm.engine.host_steps) == 1


@pytest.mark.parametrize(
    ("params", "reason"),
    [({"logprobs": 1}, "logprobs"), ({"top_k": 5}, "processing"), ({"repetition_penalty": 1.2}, "processing")],
)
def test_what_one_request_asks_for_is_the_hosts_while_it_runs(tokenizer_pair, plain, params, reason):
    asking = SamplingParams(temperature=1.0, seed=1, max_tokens=3, ignore_eos=True, **params)
    llm = make(tokenizer_pair, 2)
    assert generate(llm, PROMPTS[:2], [asking, GREEDY_9]) == generate(plain, PROMPTS[:2], [asking, GREEDY_9])
    assert llm.engine.host_steps[reason] > 0
    assert llm.metrics.steps > sum(llm.engine.host_steps.values())


def test_models_that_are_not_the_kernels_are_refused(tokenizer_pair):
    with pytest.raises(ValueError, match=r"device_round=True needs .* 'flat' on 'torch'; allowed here: .*=False"):
        make(tokenizer_pair, 2, attention_backend="torch")
    with pytest.raises(ValueError, match="synchronous=True is for device_round=True alone"):
        make(tokenizer_pair, 2, device_round=False, synchronous=True)


def test_a_draft_that_has_fallen_behind_catches_up_before_its_rounds(tokenizer_pair, plain):
    """Two sequences draft nothing on the host, for one of them asks for log-probabilities; then that one is aborted."""
    table = {"num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 64, 0]], "numerics": "exact"}
    llm = make(tokenizer_pair, 3, speculative=table | {"model": tokenizer_pair.target})
    asking = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=1)
    going_on = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    expected = generate(plain, PROMPTS[1], going_on)
    engine = llm.engine
    for i, params in enumerate([asking, going_on]):
        engine.add_request(str(i), PROMPTS[i]["prompt_token_ids"], params)
    while len(engine.requests["1"].sequences[0].output_token_ids) < 7:
        engine.step()
    engine.abort_request("0")
    behind = engine.requests["1"].sequences[0].page_table.context_lens
    assert behind[0] - behind[1] > 2
    outputs = []
    while engine.has_unfinished_requests:
        outputs += engine.step()
        engine.check_integrity()
    assert outputs[0].outputs[0].token_ids == expected[0][0][0]
    assert llm.metrics.acceptance_rate == 1.0
    assert llm.metrics.draft_tokens > 6
    assert engine.host_steps.keys() == {"nobody runs", "logprobs"}


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("num_shared", [2, 3, 4, 8])
def test_where_a_batch_is_too_large_for_drafts_no_pass_of_the_draft_is_made(
    tokenizer_pair, plain, synchronous, num_shared
):
    """Two draft nothing; when one of them has ended, the other's draft catches up, with what was in flight, too."""
    table = {"num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 64, 0]], "numerics": "exact"}
    llm = make(tokenizer_pair, 3, speculative=table | {"model": tokenizer_pair.target}, synchronous=synchronous)
    short, long = (SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (num_shared, 24))
    launch, launched = llm.engine.round.launch, []
    llm.engine.round.launch = lambda bucket: (launched.append(bucket.num_drafts), launch(bucket))[1]
    assert generate(llm, PROMPTS[:2], [short, long]) == generate(plain, PROMPTS[:2], [short, long])
    assert "a round failed" not in llm.engine.host_steps
    assert launched == sorted(launched)
    assert launched.count(0) >= num_shared - 1
    assert set(launched) == {0, 3}
    assert llm.metrics.acceptance_rate == 1.0
    assert llm.metrics.draft_tokens > 6
