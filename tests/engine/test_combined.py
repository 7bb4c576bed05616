"""Lookups and a model that draft together: whoever drafts for whom, outputs are plain decoding's, and each is told its
own outcomes.
"""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from specpaged import LLM, SamplingParams
from specpaged.drafting.combined import CombinedDrafter
from specpaged.paging.page_table import DRAFT
from specpaged.speculation.controller import Plan
from specpaged.speculation.lookup_choice import LookupChoice
from specpaged.testing.heads import write_clover, write_eagle3
from tests import toys
from tests.drafting.heads_reference import CloverReference, Eagle3Reference
from tests.drafting.test_heads import check_against_reference
from tests.engine.test_decisions import PARAMS, Whim, as_plain, planner_of
from tests.engine.test_engine import generate, make_llm, token_ids

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
LOOKUP = {"prompt_lookup_min": 1, "prompt_lookup_max": 5}
METHODS = {
    "suffix, draft model": {"method": ["suffix", "draft_model"]},
    "draft model, ngram": {"method": ("draft_model", "ngram"), **LOOKUP},
    "ngram, suffix": {"method": ["ngram", "suffix"], "model": None, **LOOKUP},
    "three": {"method": ["ngram", "draft_model", "suffix"], **LOOKUP},
}


class Chooser(Whim):
    """Decides by chance, too, whether lookups may draft, and what their drafts have to promise."""

    def __init__(self, seed, **arguments):
        super().__init__(seed, **arguments)
        self.of_lookups = {}

    def plan(self, candidates, num_steps):
        plan = super().plan(candidates, num_steps)
        if not plan.tries_rows and self.rng.random() < 0.8:
            plan.lookups = [
                LookupChoice(self.rng.randint(1, c.most), self.rng.uniform(-1.0, 1.0))
                if c.most and self.rng.random() < 0.7
                else None
                for c in candidates
            ]
        return plan

    def observe_lookup(self, lookup, sequence, num_accepted, num_rejected, evidence):
        assert sequence not in self.forgotten
        assert 0 < num_accepted + num_rejected <= len(evidence)
        assert num_rejected in (0, 1)
        self.of_lookups.setdefault(lookup, []).extend([True] * num_accepted + [False] * num_rejected)


def with_chooser(llm, seed, **arguments) -> Chooser:
    chooser = Chooser(seed, **arguments)
    follows = llm.engine.speculative_step.planner.follows_target
    llm.engine.speculative_step.planner = planner_of(chooser)
    llm.engine.speculative_step.planner.follows_target = follows
    return chooser


def watched(llm) -> list[tuple[int, int]]:
    """Of every draft from now on whose it is, and its length."""
    drafter, drafts = llm.engine.speculative_step.drafter, []
    assert isinstance(drafter, CombinedDrafter)
    propose = drafter.propose

    def watch(*arguments):
        found = propose(*arguments)
        drafts.extend((draft.drafter, len(draft)) for draft in found if draft)
        return found

    drafter.propose = watch
    return drafts


def repetitive(seed=0):
    """Prompts in which lookups find something, and others."""
    return [{"prompt_token_ids": [7, 8, 9] * 6}, *toys.prompts(len(PARAMS) - 1, seed=seed)]


@pytest.mark.parametrize("num_speculative_tokens", [4, "auto"])
@pytest.mark.parametrize("methods", METHODS)
def test_outputs_are_plain_decodings_whoever_drafts(toy_pair, methods, num_speculative_tokens):
    prompts = repetitive()
    expected = token_ids(generate(make_llm(toy_pair, k=0), prompts, [as_plain(params) for params in PARAMS]))
    speculative = {"num_speculative_tokens": num_speculative_tokens} | METHODS[methods]
    llm = make_llm(toy_pair, speculative=speculative)
    drafts = watched(llm)
    for _ in range(2):  # the second time, suffixes are found in the outputs of others
        assert token_ids(generate(llm, prompts, PARAMS)) == expected
    assert llm.metrics.failed_steps == llm.metrics.failed_proposals == 0
    drafter = llm.engine.speculative_step.drafter
    assert any(number for number, _ in drafts)
    if drafter.model is not None and num_speculative_tokens == 4:
        assert any(number == 0 for number, _ in drafts)
    assert [lookup.in_rounds.num_sequences for lookup in drafter.lookups] == [0] * len(drafter.lookups)
    planner = llm.engine.speculative_step.planner
    assert (planner is None) == (num_speculative_tokens == 4)
    if planner is not None:
        planner.outcomes.tell()
        assert planner.controller.num_requests == 0


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("methods", ["suffix, draft model", "three", "ngram, suffix"])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 3},  # prefill in chunks, and few tokens to catch up with
        {"kv_cache_memory_bytes": 1024 * 16 * 12, "max_model_len": 96},  # preempted
        {"enable_prefix_caching": True},
    ],
    ids=["", "chunks", "preemption", "prefix cache"],
)
def test_outputs_do_not_depend_on_who_is_chosen(toy_pair, seed, methods, arguments):
    prompts = repetitive(seed)
    expected = token_ids(generate(make_llm(toy_pair, k=0), prompts, [as_plain(params) for params in PARAMS]))
    has_model = "model" not in METHODS[methods]
    if not has_model and "kv_cache_memory_bytes" in arguments:
        arguments = arguments | {"kv_cache_memory_bytes": arguments["kv_cache_memory_bytes"] // 2}  # one pool
    llm = make_llm(toy_pair, speculative={"num_speculative_tokens": "auto"} | METHODS[methods], **arguments)
    chooser, drafts = with_chooser(llm, seed, looks_back=has_model), watched(llm)
    wanted = {0, 1} if has_model else {1}
    for again in range(6):  # the second time, prompts may be found in the cache; and until all have drafted
        assert token_ids(generate(llm, prompts, PARAMS)) == expected
        if again and {number for number, _ in drafts} >= wanted:
            break
    assert llm.metrics.failed_steps == llm.metrics.failed_proposals == 0
    assert {number for number, _ in drafts} >= wanted
    assert chooser.of_lookups.keys() == set(range(len(llm.engine.speculative_step.drafter.lookups)))
    assert "kv_cache_memory_bytes" not in arguments or llm.metrics.preemptions > 0


@pytest.mark.parametrize(("temperature", "verification"), [(0.0, "coupled"), (0.7, "coupled"), (0.0, "rejection")])
def test_each_drafter_is_told_what_came_of_its_own_drafts_and_a_model_that_lags_catches_up(
    toy_pair, temperature, verification
):
    """The model is the target: all of its drafts stand, if its KV is right wherever lookups have come between; a
    lookup's do now and then.
    """
    speculative = {"num_speculative_tokens": "auto", "numerics": "exact", "verification": verification}
    llm = make_llm(toy_pair, draft=toy_pair.target, speculative=speculative | METHODS["draft model, ngram"])
    chooser, drafts = with_chooser(llm, 5), watched(llm)
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=40, ignore_eos=True) for i in range(7)]
    generate(llm, repetitive(), params)
    assert {number for number, _ in drafts} == {0, 1}
    assert chooser.num_looks > 0
    assert chooser.outcomes
    assert all(chooser.outcomes)
    assert not all(chooser.of_lookups[0])


def test_a_model_that_was_passed_over_has_no_kv_of_what_it_has_not_run(toy_pair):
    """Nor has it after the next proposal any of drafts that somebody else has made."""
    llm = make_llm(toy_pair, k=4, speculative=METHODS["draft model, ngram"], num_scheduler_steps=1)
    step, num_left_out = llm.engine.speculative_step, 0
    step.drafter.choice = lambda num_tokens, num_of_model: LookupChoice(num_tokens, -1.0) if num_tokens else None
    llm.engine.add_request("r", [7, 8, 9] * 6, GREEDY)
    (sequence,) = llm.engine.requests["r"].sequences
    before = 0
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
        context_len = sequence.page_table.context_lens[DRAFT]
        if sequence.draft.drafter:
            num_left_out += 1
            assert context_len == before
        elif sequence.draft:
            assert context_len == sequence.num_tokens + len(sequence.draft) - 1
        before = min(context_len, sequence.num_tokens)
    assert num_left_out > 4


@pytest.mark.parametrize("method", ["eagle3", "clover"])
@pytest.mark.parametrize("num_speculative_tokens", [4, "auto"])
def test_heads_follow_the_target_while_lookups_draft(target, tmp_path, method, num_speculative_tokens):
    """Where they draft, it is what a dense reference does that has seen everything."""
    config = AutoConfig.from_pretrained(target[0])
    path = (write_eagle3 if method == "eagle3" else write_clover)(tmp_path, config)
    plain = LLM(target[0], max_model_len=104, numerics="exact")
    speculative = {
        "method": ["ngram", method],
        "model": str(path),
        "num_speculative_tokens": num_speculative_tokens,
        "numerics": "exact",
        **LOOKUP,
    }
    if num_speculative_tokens == "auto":
        speculative["max_num_speculative_tokens"] = 4
    limits = {"max_model_len": 104, "max_num_seqs": 8, "max_num_batched_tokens": 16, "block_size": 4}
    llm = LLM(target[0], speculative_config=speculative, **limits)
    step, proposals, numbers, in_rounds = llm.engine.speculative_step, [], set(), set()
    if num_speculative_tokens == "auto":
        with_chooser(llm, 4, looks_back=False)
    propose, commit = step.drafter.propose, step.commit

    def record(known, drafter, token_ids, logprobs):
        numbers.add(drafter)
        if not drafter:
            proposals.append((list(known), list(token_ids), list(logprobs)))

    def record_proposal(rows, sampling, stop_rule=None):
        drafts = propose(rows, sampling, stop_rule)
        for row in rows:
            if row.num_draft_tokens and sampling.requests[row.request_idx].takes_argmax:
                draft = drafts[row.request_idx]
                if draft:
                    record(row.sequence.token_ids, draft.drafter, draft.token_ids, draft.logprobs)
        return drafts

    def record_rounds(scored, verified):
        for i, entry in enumerate(scored.entries if scored.rounds is not None else ()):
            known = list(entry.sequence.token_ids)
            for number, of_round in enumerate(scored.rounds.rounds):
                if number and of_round.evidence[i]:  # the first round's are the host's
                    in_rounds.add(of_round.drafters[i])
                    record(known, of_round.drafters[i], of_round.drafts[i] + of_round.left_out[i], of_round.evidence[i])
                known += of_round.token_ids[i]
            drafts, evidence = scored.rounds.waiting()[i]
            if drafts:
                record(known, scored.rounds.waiting_drafters[i], drafts, evidence)
        commit(scored, verified)

    step.drafter.propose, step.commit = record_proposal, record_rounds
    prompts = [{"prompt_token_ids": [7, 8, 9] * 6}, *toys.prompts(4, shortest=20)]
    params = [SamplingParams(temperature=0.8 * (i % 3 == 2), seed=i, max_tokens=24, ignore_eos=True) for i in range(5)]
    expected = token_ids(plain.generate(prompts, params, use_tqdm=False))
    assert token_ids(generate(llm, prompts, params)) == expected
    greedy = [(prompt, i) for i, prompt in enumerate(prompts) if i % 3 != 2]  # alone, rounds are one call
    alone = generate(llm, [prompt for prompt, _ in greedy], params[0])
    assert token_ids(alone) == [expected[i] for _, i in greedy]
    assert llm.metrics.failed_proposals == llm.metrics.failed_steps == 0
    assert numbers == {0, 1}
    assert in_rounds == {0, 1} or num_speculative_tokens == "auto"
    reference = (Eagle3Reference if method == "eagle3" else CloverReference)(path, target[1])
    check_against_reference(reference, target, proposals)


def test_ranks_agree_on_who_may_look_up_and_choose_alike(toy_pair):
    """By evidence at its word, as each rank knows its own outcomes at another time."""
    prompts = repetitive()[:3]
    expected = token_ids(generate(make_llm(toy_pair, k=0), prompts, GREEDY))
    llm = make_llm(toy_pair, speculative={"num_speculative_tokens": "auto"} | METHODS["draft model, ngram"])
    with_chooser(llm, 2)
    step, propose, choices = llm.engine.speculative_step, llm.engine.speculative_step.drafter.propose, []

    def watch(rows, *rest):
        choices.extend((row.lookup, row.num_draft_tokens) for row in rows if row.lookup is not None)
        return propose(rows, *rest)

    step.drafter.propose = watch
    step.agree = lambda lists: [list(of) for of in lists]
    assert token_ids(generate(llm, prompts, GREEDY)) == expected
    assert llm.metrics.failed_steps == llm.metrics.failed_proposals == 0
    assert choices
    assert all(not choice.rules and choice.least >= k / 2 for choice, k in choices)


def test_whoever_stays_keeps_its_choice_and_who_comes_asks_for_one(toy_pair):
    llm = make_llm(toy_pair, speculative={"num_speculative_tokens": "auto"} | METHODS["draft model, ngram"])
    planner, asked = llm.engine.speculative_step.planner, []

    def plan(candidates, num_steps):
        asked.append(len(candidates))
        choices = [LookupChoice(1 + i) for i, _ in enumerate(candidates)]
        return Plan([0] * len(candidates), num_steps=64, lookups=choices)

    planner.controller.plan = plan
    for i, prompt in enumerate(toys.prompts(3)):
        llm.engine.add_request(str(i), prompt["prompt_token_ids"], GREEDY)
    for _ in range(3):
        llm.engine.step()
    sequences = list(planner._standing.sequences)
    asked.clear()
    planner.forget(sequences[1])
    kept = planner.plan([sequences[0], sequences[2]]).lookups
    assert [choice.num_tokens for choice in kept] == [1, 3]
    assert not asked
    planner.plan(sequences)
    assert asked == [3]
