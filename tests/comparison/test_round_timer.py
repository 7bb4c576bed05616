"""Rounds are timed as they are run: known times of an engine's calls are found again, whatever lies between them."""

from __future__ import annotations

from itertools import pairwise

import pytest

from specpaged import LLM, SamplingParams
from specpaged.comparison.round_timer import DEPTHS, RoundTimer, _typical
from tests.heads_world import heads_llm

GREEDY = SamplingParams(temperature=0, max_tokens=12)
ENDLESS = SamplingParams(temperature=0, max_tokens=None)
PROMPTS = [[1 + (7 * i + j) % 250 for j in range(20 + 5 * i)] for i in range(5)]


class KnownTimes:
    """Stands before an engine's `step`: calls take what is known of their rounds, and much more behind another K.

    By turns they take a little more or less, so that the median moves where any dear ones are among them.
    """

    def __init__(self, engine, seconds, of_context=0.0):
        self.engine, self.seconds, self.honest = engine, seconds, engine.step
        self.of_context = of_context  # seconds that each token of the context adds to a round
        self.now, self.last_depth, self.age, self.calls = 0.0, None, 0, []
        engine.step = self.step

    def clock(self):
        return self.now

    def step(self):
        step, running = self.engine.speculative_step, self.engine.scheduler.running
        [depth] = {sequence.max_draft_tokens for sequence in running} or {None}
        num_seqs, before = len(running), step.metrics.rounds
        context_len = running[0].num_tokens if running else 0
        outputs = self.honest()
        num_rounds = step.metrics.rounds - before
        if depth is None:
            self.now += 50.0
        else:
            self.age = self.age + 1 if depth == self.last_depth else 0
            of_round = self.seconds(num_seqs, depth) + self.of_context * context_len + 0.1 * (-1) ** self.age
            self.now += num_rounds * of_round + (0.0 if self.age else 100.0)
            self.calls.append((num_seqs, depth, step.drafter is not None, step.planner is not None, num_rounds))
        self.last_depth = depth
        return outputs


def seconds_of(num_seqs, depth):
    """Of no straight line, so that no depth can stand for another."""
    return 0.3 + 0.1 * num_seqs + 0.01 * depth**2


def llm_of(pair, **arguments):
    return LLM(pair.target, speculative_config={"model": pair.draft}, **({"max_num_seqs": 4} | arguments))


@pytest.mark.parametrize(
    ("num_seqs", "most_rounds", "max_model_len"), [(1, 4, 512), (4, 4, 512), (4, 1, 512), (2, 4, 140)]
)
def test_known_times_of_rounds_are_found_again(toy_pair, num_seqs, most_rounds, max_model_len):
    llm = llm_of(toy_pair, max_model_len=max_model_len)
    known = KnownTimes(llm.engine, seconds_of)
    timer = RoundTimer(llm.engine, PROMPTS, ENDLESS, known.clock)
    found = timer.round_seconds(num_seqs, most_rounds, 500.0)
    exact = {depth: seconds_of(num_seqs, depth) for depth in DEPTHS}
    exact[5], exact[7] = (exact[4] + exact[6]) / 2, (exact[6] + exact[8]) / 2
    assert found == pytest.approx([exact[depth] for depth in range(9)])
    timed = [call for call in known.calls if call[0] == num_seqs]
    assert {depth for _, depth, *_ in timed} == set(DEPTHS)
    assert all(num_rounds <= most_rounds and not decides for _, _, _, decides, num_rounds in timed)
    assert all(drafts for _, depth, drafts, *_ in timed if depth)


def test_rounds_with_and_without_drafts_count_by_their_share_and_a_pause_does_not():
    seconds = [1.0, 1.0, 1.0, 5.0] * 25
    assert _typical(seconds) == pytest.approx(2.0)
    seconds[7] = 1000.0
    assert _typical(seconds) == pytest.approx(2.0)
    assert _typical([3.0]) == 3.0


def test_contexts_that_grow_make_no_depth_dearer(toy_pair):
    llm = LLM(toy_pair.target, speculative_config={"model": toy_pair.target}, max_model_len=512)
    known = KnownTimes(llm.engine, lambda num_seqs, depth: 0.0, of_context=1.0)
    found = RoundTimer(llm.engine, PROMPTS[:1], ENDLESS, known.clock).round_seconds(1, 4, 0.0)
    assert max(found) - min(found) < 30  # of 380 tokens that a sweep's depths bring
    assert min(found) > 100


def test_no_more_is_timed_than_there_is_time_for(toy_pair):
    """But once, however long that takes."""

    def spent(budget):
        llm = llm_of(toy_pair)
        known = KnownTimes(llm.engine, seconds_of)
        RoundTimer(llm.engine, PROMPTS, ENDLESS, known.clock).round_seconds(2, 4, budget)
        return known.now

    once = spent(0.0)
    assert once > 1000
    for times in (0.5, 1.9, 3.5):
        assert max(1.0, times) - 1.1 < spent(times * once) / once <= max(1.0, times)


def test_plain_rounds_are_timed_without_a_drafter(toy_pair):
    llm = llm_of(toy_pair)
    known = KnownTimes(llm.engine, seconds_of)
    RoundTimer(llm.engine, PROMPTS, GREEDY, known.clock).round_seconds(2, 4, 0.0)
    assert sum(not drafts for _, depth, drafts, *_ in known.calls if not depth) >= 6


@pytest.mark.parametrize("method", ["eagle3", "clover"])
def test_heads_draft_in_every_round_that_is_timed_with_drafts(target, heads, method):
    """Though what the target runs in plain rounds they have not read."""
    speculative = {"num_speculative_tokens": "auto"}
    engine = heads_llm(target, method, heads[method], max_model_len=256, speculative=speculative).engine
    honest, calls = engine.step, []

    def step():
        depths, before = {s.max_draft_tokens for s in engine.scheduler.running}, engine.metrics.proposed_tokens
        outputs = honest()
        calls.append((depths, engine.metrics.proposed_tokens - before))
        return outputs

    engine.step = step
    RoundTimer(engine, PROMPTS, ENDLESS).round_seconds(2, 4, 0.0)
    timed = [(*depths, count) for (last, _), (depths, count) in pairwise(calls) if last == depths]
    assert {depth for depth, _ in timed} == set(DEPTHS)
    assert all((count > 0) == (depth > 0) for depth, count in timed)


def test_the_engine_is_left_as_it_was(toy_pair):
    llm = llm_of(toy_pair)
    step, prompts = llm.engine.speculative_step, [{"prompt_token_ids": ids} for ids in PROMPTS]
    parts = step.planner, step.drafter, step.call_length
    before = llm.generate(prompts, GREEDY, use_tqdm=False)
    RoundTimer(llm.engine, PROMPTS, GREEDY).round_seconds(3, 1, 0.0)
    llm.engine.check_idle()
    llm.engine.check_integrity()
    assert (step.planner, step.drafter, step.call_length) == parts
    after = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in after] == [o.outputs[0].token_ids for o in before]


def test_what_has_no_room_is_refused_or_left_out(toy_pair):
    with pytest.raises(ValueError, match="max_model_len=64 has no room for rounds to be timed; allowed: 119 or more"):
        RoundTimer(llm_of(toy_pair, max_model_len=64).engine, PROMPTS, GREEDY)
    engine = llm_of(toy_pair, max_model_len=256, kv_cache_memory_bytes=1 << 18).engine
    assert engine.target.kv_cache.num_slots < 4 * 128
    assert RoundTimer(engine, [[1] * 128], GREEDY).round_seconds(4, 4, 0.0) is None
    engine.check_idle()
