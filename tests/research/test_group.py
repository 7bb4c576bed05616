"""Caches of their own, put together for each batch."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from specpaged import SamplingParams
from specpaged.paging.block_allocator import IntegrityError
from specpaged.paging.page_table import DRAFT
from tests.research.engines import make_llm
from tests.research.world import MAX_MODEL_LEN, K, World


@pytest.mark.parametrize("seed", range(6))
def test_every_batch_finds_the_tokens_of_its_sequences(seed):
    """World.play looks, before it writes, at every token of every row."""
    rng = random.Random(seed)
    world = World("group", num_rows=3, num_sequences=6)
    for _ in range(40):
        while len(world.lines) < 6:
            world.add(rng.randint(1, 20))
        chosen = rng.sample(world.lines, rng.randint(1, 3))
        world.play({line: rng.randint(0, K) for line in chosen})
        for line in list(world.lines):
            if line.num_tokens + K >= MAX_MODEL_LEN or rng.random() < 0.05:
                world.remove(line)
        world.realign()
    assert world.kv_layout.copied.rollback == 0
    assert world.kv_layout.copied.gather > 0
    assert world.kv_layout.copied.other > 0


def test_sequences_of_one_length_begin_in_column_0_and_those_that_stay_are_not_copied_again():
    world = World("group", num_rows=2, num_sequences=3)
    first, second, third = world.add(6), world.add(6), world.add(20)
    world.play({first: 1, second: 1})
    world.realign(num_drafts=0)
    assert world.kv_layout.copied.gather == 0
    for _ in range(2):
        world.play({first: 2, second: 2})
        assert first.page_table.start == second.page_table.start == 0
        world.realign(num_drafts=0)
    assert world.kv_layout.copied.gather == 0
    held = world.kept_bytes(first)
    world.play({third: 3, first: 0})  # behind which the longer one sets the columns
    world.realign(num_drafts=None)
    assert world.kv_layout.copied.gather == held
    assert world.kv_layout.copied.other == sum(map(world.kept_bytes, world.lines))


def test_kv_that_was_cut_off_is_copied_to_its_cache_again():
    """As an uncached draft's is after every round. World.play looks at every token of a row before it writes."""
    world = World("group", num_rows=1, num_sequences=2)
    first, second = world.add(6), world.add(4)
    world.play({first: 1})
    world.realign()
    first.page_table.truncate(DRAFT, 0)
    for own in world.caches[DRAFT].caches[first.page_table.blocks[0] - 1]:
        own.fill_(float("nan"))
    for line in (first, second, first):
        world.play({line: 0})
        world.realign()


@pytest.mark.parametrize("moves", [False, True], ids=["gives up its row", "is moved"])
def test_what_was_drafted_is_copied_to_its_own_cache_before_its_row_is_another_ones(moves):
    """And not before: a sequence that stays where it is has nothing copied for its drafts."""
    world = World("group", num_rows=2, num_sequences=3)
    first, second, third = world.add(6), world.add(6), world.add(20)
    world.play({first: 1, second: 1})
    world.realign()
    saved = world.kv_layout.copied.other
    assert saved == 2 * 7 * world.caches[0].bytes_per_token
    world.play({first: 1, second: 1})
    world.realign()
    world.play({third: 0, first: 0} if moves else {third: 0})
    world.realign(num_drafts=None)
    world.play({first: 0, second: 0})  # which looks at every token of the rows, drafts among them
    world.realign()


def test_what_is_not_in_a_sequences_own_cache_is_found():
    world = World("group", num_rows=1)
    line = world.add(5)
    world.play({line: 2})
    with pytest.raises(IntegrityError, match=r"\[0, 0\] of its \[7, 0\] tokens"):
        world.kv_layout.check_integrity()
    world.realign()


@pytest.mark.parametrize("schedule", ["continuous", "eqspec", "exspec"])
def test_drafts_behind_accepted_drafts_stay_within_their_row(toy_pair, schedule, monkeypatch):
    """A short sequence accepts all of its drafts beside one that is as long as sequences get, and drafts again."""
    k, params = 5, {"temperature": 0, "ignore_eos": True}
    llm = make_llm(replace(toy_pair, draft=toy_pair.target), schedule, "group", k=k, max_num_seqs=2)
    engine, ends = llm.engine, []
    propose, cache = engine.speculative_step.drafter.propose, engine.draft.kv_cache

    def watched(rows, sampling, stop_rule=None):
        for row in rows:
            column = row.blocks[0] % cache.num_columns
            ends.append(column + row.context_len + len(row.token_ids) + max(0, row.num_draft_tokens - 1))
        return propose(rows, sampling)

    monkeypatch.setattr(engine.speculative_step.drafter, "propose", watched)
    for length in range(30, 47):
        prompts = [{"prompt_token_ids": list(range(1, length + 1))}, {"prompt_token_ids": [3, 4, 5, 6]}]
        counts = (48 - length, 30)
        llm.generate(prompts, [SamplingParams(max_tokens=n, **params) for n in counts], use_tqdm=False)
    assert llm.metrics.accepted_tokens > 100
    assert 48 + k < max(ends) <= cache.num_columns
