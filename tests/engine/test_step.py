"""The seam between the step and any drafter: what it is handed, what it is told to forget, and that it decides nothing.

The drafter here is told what to propose, and checks what comes. Its KV is a list of tokens for each sequence.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from specpaged import LLM, SamplingParams
from specpaged.drafting.draft import NO_DRAFT, Draft
from specpaged.engine.sequence import Sequence
from specpaged.modeling.forward_output import HiddenStates, HiddenStatesRequest
from specpaged.paging.page_table import DRAFT, TARGET
from specpaged.sampling.noise import gumbel_noise
from specpaged.speculation.controller import Plan
from tests import toys
from tests.engine.test_engine import GREEDY, make_llm, token_ids
from tests.modeling.world import World
from tests.poison import Poison

NAN_TOKEN_ID = 1  # of `nan_pair`
BLOCK_SIZE = 4
BYTES_PER_BLOCK = BLOCK_SIZE * 512  # of one toy model's KV
WITH_KV = {"num_speculative_tokens": 4}
WITHOUT_KV = {"method": "ngram", "num_speculative_tokens": 4, "model": None}
BOTH = pytest.mark.parametrize("speculative", [WITH_KV, WITHOUT_KV], ids=["with KV", "without KV"])


class Reader:
    """Proposes what `guess(sequence, count)` says: at most `count` tokens."""

    hidden_states = HiddenStatesRequest(last=True, layer_inputs=(0, 1))

    def __init__(self, guess: Callable[[Sequence, int], list[int]]):
        self.guess = guess
        self.kv: dict[Sequence, list[int]] = {}  # what the drafter has run
        self.read: dict[Sequence, list[HiddenStates]] = {}  # of the positions from 0 on
        self.ended: dict[Sequence, list[HiddenStates]] = {}  # what was read of those that ended
        self.num_forgotten: Counter[Sequence] = Counter()

    def propose(self, rows, sampling, stop_rule=None):
        drafts = [None] * len(sampling.requests)
        for row in rows:
            sequence = row.sequence
            assert sequence.error is None
            assert row.hidden_states is not None
            states = self.read.setdefault(sequence, [])
            assert row.hidden_position == len(states)  # neither twice nor left out
            states += row.hidden_states.split([1] * len(row.hidden_states.last))
            assert len(states) == sequence.page_table.context_lens[TARGET]
            draft = NO_DRAFT
            if row.num_draft_tokens:
                assert drafts[row.request_idx] is None
                assert sampling.requests[row.request_idx] is sequence.sampling_request
                draft = drafts[row.request_idx] = Draft(self.guess(sequence, row.num_draft_tokens))
            self._run(row, draft)
        assert None not in drafts
        return drafts

    def _run(self, row, draft):
        if not row.blocks:
            assert not row.token_ids
            return
        kv, known = self.kv.setdefault(row.sequence, []), row.sequence.token_ids
        assert row.context_len == len(kv) == row.hidden_position
        assert row.token_ids[0] == known[row.context_len]
        kv += row.token_ids[1:]  # at the position of the hidden state before each
        assert kv == known[1 : 1 + len(kv)]
        assert len(kv) == min(row.sequence.page_table.context_lens[TARGET], len(known) - 1)
        assert len(kv) + max(0, len(draft) - 1) <= len(row.blocks) * BLOCK_SIZE

    def forget(self, sequence):
        self.num_forgotten[sequence] += 1
        self.kv.pop(sequence, None)
        states = self.read.pop(sequence, [])
        if sequence.has_ended:
            self.ended[sequence] = states

    def check_hidden_states(self, llm):
        """They are those of a plain pass over all of a sequence, bit for bit."""
        for sequence, states in self.ended.items():
            if not states:
                continue
            row = ("whole", sequence.token_ids[: len(states)], 0, len(states))
            whole = World(llm.engine.target.model).forward(row, hidden=self.hidden_states).hidden_states
            assert torch.equal(torch.cat([state.last for state in states]), whole.last)
            for i, layer_input in enumerate(whole.layer_inputs):
                assert torch.equal(torch.cat([state.layer_inputs[i] for state in states]), layer_input)


def reading_llm(pair, speculative, guess, follows_target=False, **arguments) -> tuple[LLM, Reader]:
    """An engine with so little KV that sequences are preempted and drafts go without, and its drafter."""
    num_pools = 1 if "method" in speculative else 2
    defaults = {
        "max_model_len": 104,
        "max_num_batched_tokens": 24,  # prefill in chunks
        "block_size": BLOCK_SIZE,
        "kv_cache_memory_bytes": 40 * BYTES_PER_BLOCK * num_pools,
    }
    llm = make_llm(pair, speculative=speculative, **(defaults | arguments))
    reader = Reader(guess)
    llm.engine.speculative_step.drafter = reader
    llm.engine.speculative_step.follows_target = follows_target
    return llm, reader


def guesses(expected: dict[tuple[int, ...], list[int]], rng: random.Random) -> Callable[[Sequence, int], list[int]]:
    """So many tokens as asked for or fewer, of which some are the `expected` ones, by prompt, and some are not."""

    def guess(sequence, count):
        num_outputs = len(sequence.output_token_ids)
        right = expected[tuple(sequence.prompt_token_ids)][num_outputs : num_outputs + rng.randint(0, count)]
        wrong = [rng.randrange(2, toys.VOCAB_SIZE) for _ in range(rng.randint(0, count))]
        return (right + wrong)[: rng.randint(0, count)]

    return guess


def plain_outputs(pair, prompts, params, **arguments) -> list[list[int]]:
    llm = make_llm(pair, k=0, max_num_seqs=1, max_model_len=104, **arguments)
    return [ids for (ids,) in token_ids(llm.generate(prompts, params, use_tqdm=False))]


def run(llm, prompts, params, aborts: dict[int, str]) -> tuple[dict[int, list[int]], list[Sequence]]:
    """Outputs by prompt, and all sequences. `aborts` names a request for each step behind which it is aborted."""
    engine = llm.engine
    for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(i), prompt["prompt_token_ids"], p)
    sequences = [sequence for request in engine.requests.values() for sequence in request.sequences]
    outputs, step = {}, 0
    while engine.has_unfinished_requests:
        for output in engine.step():
            assert output.error is None
            outputs[int(output.request_id)] = output.outputs[0].token_ids
        engine.check_integrity()
        if step in aborts:
            assert engine.abort_request(aborts[step]) is not None
        step += 1
    assert engine.allocator.num_free == engine.allocator.num_blocks
    return outputs, sequences


@BOTH
@pytest.mark.parametrize("follows_target", [False, True])
def test_whatever_is_drafted_each_token_is_handed_over_once_and_outputs_are_those_of_plain_decoding(
    toy_pair, speculative, follows_target
):
    """Greedy and sampled; through chunks, rejections, steps without room for drafts, preemptions and aborts."""
    prompts = toys.prompts(7, longest=50)
    params = [SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=50, ignore_eos=True) for i in range(7)]
    expected = plain_outputs(toy_pair, prompts, params)
    by_prompt = {tuple(p["prompt_token_ids"]): ids for p, ids in zip(prompts, expected, strict=True)}
    for seed in range(2):
        guess = guesses(by_prompt, random.Random(seed))
        llm, reader = reading_llm(toy_pair, speculative, guess, follows_target)
        outputs, sequences = run(llm, prompts, params, aborts={9: "1", 10: "6"})
        assert outputs == {i: expected[i] for i in (0, 2, 3, 4, 5)}
        metrics = llm.metrics
        assert metrics.preemptions > 0
        assert 0 < metrics.accepted_tokens < metrics.draft_tokens
        assert reader.num_forgotten == {sequence: 1 + sequence.metrics.preemptions for sequence in sequences}
        assert not reader.read
        reader.check_hidden_states(llm)
        for i in outputs:
            num_unread = sequences[i].num_tokens - len(reader.ended[sequences[i]])
            assert num_unread == 1 or (not follows_target and 1 < num_unread <= 6)  # the last step's


@BOTH
@pytest.mark.parametrize("after", [0, 5])
def test_nothing_more_is_handed_over_of_a_sequence_that_has_failed(toy_pair, speculative, after, monkeypatch):
    """Even where the drafter follows the target: hidden states of NaN are of no use."""
    prompts, params = toys.prompts(3), SamplingParams(max_tokens=16, **GREEDY)
    llm, reader = reading_llm(toy_pair, speculative, lambda sequence, count: [5] * count, follows_target=True)
    Poison(llm, prompts[1]["prompt_token_ids"], after, monkeypatch)
    failed = llm.generate(prompts, params, use_tqdm=False)[1]
    assert "NaN" in failed.error
    assert len(failed.outputs[0].token_ids) == after
    assert list(reader.num_forgotten.values()) == [1, 1, 1]
    reader.check_hidden_states(llm)


@pytest.fixture(scope="module")
def nan_pair(tmp_path_factory):
    """A target of which one token's embedding is NaN, and which never decodes it."""
    directory = tmp_path_factory.mktemp("nan")
    target = toys.model(tie_word_embeddings=False, eos_token_id=None)
    with torch.no_grad():
        target.model.embed_tokens.weight[NAN_TOKEN_ID] = float("nan")
        target.lm_head.weight[NAN_TOKEN_ID] = 0
    target.save_pretrained(directory / "target")
    toys.model(eos_token_id=None).save_pretrained(directory / "draft")
    return toys.Pair(str(directory / "target"), str(directory / "draft"))


@BOTH
def test_hidden_states_are_those_of_the_pass_that_counts_where_a_draft_spoils_the_first(nan_pair, speculative):
    prompts = [{"prompt_token_ids": [t + (t == NAN_TOKEN_ID) for t in p["prompt_token_ids"]]} for p in toys.prompts(4)]
    params, backend = [SamplingParams(max_tokens=16, **GREEDY)] * 4, {"attention_backend": "torch"}
    expected = plain_outputs(nan_pair, prompts, params, **backend)
    by_prompt = {tuple(p["prompt_token_ids"]): ids for p, ids in zip(prompts, expected, strict=True)}

    def guess(sequence, count):
        num_outputs = len(sequence.output_token_ids)
        right = by_prompt[tuple(sequence.prompt_token_ids)][num_outputs : num_outputs + count]
        return right if num_outputs < 4 else [*right[:1], NAN_TOKEN_ID]

    llm, reader = reading_llm(nan_pair, speculative, guess, follows_target=True, **backend)
    outputs, sequences = run(llm, prompts, params, aborts={})
    assert outputs == dict(enumerate(expected))
    assert all(sequence.max_draft_tokens == 0 for sequence in sequences)  # each was scored anew, once
    assert all(len(states) == sequence.num_tokens - 1 for sequence, states in reader.ended.items())
    reader.check_hidden_states(llm)


def test_drafts_that_a_host_brings_are_rolled_back_as_a_sequences_own(toy_pair, monkeypatch):
    """vLLM's scheduler says which drafts run. Here they are nobody's, and the first of three is right."""
    prompts, params = toys.prompts(4), [SamplingParams(max_tokens=16, **GREEDY)] * 4
    expected = plain_outputs(toy_pair, prompts, params)
    llm = make_llm(toy_pair, k=0, num_scheduler_steps=1)
    schedule = llm.engine.scheduler.schedule

    def with_drafts(entry):
        right = expected[int(entry.sequence.request_id)][len(entry.sequence.output_token_ids) :]
        entry.sequence.page_table.reserve(entry.num_known + 3)
        return entry._replace(draft=Draft([*right[:1], 5, 6]))

    def bring_drafts():
        scheduled = schedule()
        return replace(scheduled, entries=tuple(map(with_drafts, scheduled.entries)))

    monkeypatch.setattr(llm.engine.scheduler, "schedule", bring_drafts)
    outputs, _ = run(llm, prompts, params, aborts={})
    assert outputs == dict(enumerate(expected))
    assert llm.metrics.accepted_tokens > 20


@pytest.mark.parametrize("k", [3, 7])
def test_behind_a_commit_no_pool_holds_kv_of_a_token_that_is_not_known(toy_pair, monkeypatch, k):
    """Not even of drafts that were accepted behind a stop. What was not emitted was rolled back, and counted so."""
    prompts = toys.prompts(8)
    free = plain_outputs(toy_pair, prompts, [SamplingParams(max_tokens=30, **GREEDY)] * 8)
    params = [SamplingParams(max_tokens=30, stop_token_ids=[ids[13]], **GREEDY) for ids in free]
    llm = make_llm(toy_pair, k=k, draft=toy_pair.target, speculative={"numerics": "exact"}, num_scheduler_steps=1)
    step = llm.engine.speculative_step
    commit, num_rolled_back, num_behind_a_stop = step.commit, 0, 0

    def watched(scored, verified):
        nonlocal num_rolled_back, num_behind_a_stop
        before = [entry.sequence.num_tokens for entry in scored.entries]
        commit(scored, verified)
        for entry, num_tokens, num_accepted in zip(scored.entries, before, verified.num_accepted, strict=True):
            sequence = entry.sequence
            num_emitted = sequence.num_tokens - num_tokens
            assert max(sequence.page_table.context_lens) <= sequence.num_tokens
            assert sequence.page_table.context_lens[TARGET] == num_tokens + min(num_accepted, num_emitted)
            assert not sequence.draft
            num_rolled_back += entry.num_draft_tokens - min(num_accepted, num_emitted)
            num_behind_a_stop += max(0, num_accepted - num_emitted)

    monkeypatch.setattr(step, "commit", watched)
    run(llm, prompts, params, aborts={})
    assert num_behind_a_stop > 0
    assert llm.metrics.rolled_back_tokens == num_rolled_back
    assert llm.metrics.acceptance_rate == 1.0


def test_drafts_are_those_that_the_ranks_have_agreed_on(toy_pair):
    """They verify together: all of them take one rank's."""
    prompt, params = toys.prompts(1), SamplingParams(max_tokens=24, **GREEDY)
    llm = make_llm(toy_pair, k=3)
    (expected,) = plain_outputs(toy_pair, prompt, [params])
    llm.engine.add_request("r", prompt[0]["prompt_token_ids"], params)
    (sequence,) = llm.engine.requests["r"].sequences

    def agree(drafts):
        (token_ids,) = drafts
        assert len(token_ids) <= 3
        start = len(sequence.output_token_ids)
        return [expected[start : start + len(token_ids)]]

    llm.engine.speculative_step.agree = agree
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    assert sequence.output_token_ids == expected
    assert llm.metrics.draft_tokens > 0
    assert llm.metrics.acceptance_rate == 1.0


def test_a_sequence_that_drafts_no_more_is_not_caught_up(toy_pair):
    """As one that was scored anew is: not even behind a prefill, when it is back from a preemption."""
    llm = make_llm(toy_pair, k=3)
    llm.engine.add_request("r", toys.prompts(1)[0]["prompt_token_ids"], SamplingParams(max_tokens=4, **GREEDY))
    (sequence,) = llm.engine.requests["r"].sequences
    sequence.max_draft_tokens = 0
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
        assert sequence.page_table.context_lens[DRAFT] == 0


def test_noise_is_drawn_once_for_a_draft_and_its_verification(toy_pair, monkeypatch):
    """Where it is kept: kernels make it where they add it."""
    llm = make_llm(toy_pair, k=4, attention_backend="torch")
    step, drawn, calls = llm.engine.speculative_step, set(), []

    def noting(seeds, output_idx, *arguments):
        drawn.update(zip(seeds, output_idx, strict=True))
        return gumbel_noise(seeds, output_idx, *arguments)

    def watch(name):
        call = getattr(step, name)

        def watched(*arguments):
            drawn.clear()
            result = call(*arguments)
            calls.append(set(drawn))
            return result

        monkeypatch.setattr(step, name, watched)

    monkeypatch.setattr("specpaged.sampling.batch.gumbel_noise", noting)
    watch("verify")
    watch("propose")
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=30, ignore_eos=True)
    llm.generate(toys.prompts(3), params, use_tqdm=False)
    assert 0 < llm.metrics.accepted_tokens < llm.metrics.draft_tokens
    assert all(calls[::2])  # the bonus token's, at least
    assert any(calls[1::2])
    assert not any(before & after for before, after in pairwise(calls))
    assert step.noise == {}  # nothing is kept for nobody


def test_a_long_backlog_is_caught_up_with_in_several_steps(toy_pair, monkeypatch):
    """No proposal runs more of it than a step has room for; drafts come with the last of them."""
    llm = make_llm(toy_pair, k=3, speculative={"num_speculative_tokens": "auto"}, max_num_batched_tokens=24)
    step, depth, ran = llm.engine.speculative_step, 0, []
    propose = step.drafter.propose
    monkeypatch.setattr(step.planner.controller, "plan", lambda candidates, _: Plan([depth] * len(candidates)))
    monkeypatch.setattr(
        step.drafter,
        "propose",
        lambda rows, *rest: (
            ran.append([(len(row.token_ids), row.num_draft_tokens) for row in rows]) or propose(rows, *rest)
        ),
    )
    prompts = [{"prompt_token_ids": list(range(1, 1 + n))} for n in (60, 6)]
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=30, **GREEDY)
        llm.engine.add_request(str(i), prompt["prompt_token_ids"], params)
    while not all(r.sequences[0].output_token_ids for r in llm.engine.requests.values()):
        llm.engine.step()
    assert not ran
    depth = 3
    for _ in range(12):
        llm.engine.step()
        llm.engine.check_integrity()
    first, *_ = ran
    assert first[0] == (24, 0)
    assert first[1][1] == 3
    backlogs = [num_tokens for rows in ran for num_tokens, _ in rows if num_tokens > 16]
    assert sum(backlogs) >= 48
    assert all(sum(n for n, _ in rows if n > 16) <= 24 for rows in ran)
    assert any(k == 3 for _, k in [rows[0] for rows in ran])
