"""Several rounds in one call are those that single steps would be: the same tokens, drafts and counts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from specpaged import LLM, SamplingParams
from specpaged.drafting.draft import Draft
from specpaged.drafting.draft_model import DraftModelDrafter
from specpaged.drafting.ngram import NgramDrafter
from specpaged.drafting.suffix import SuffixDrafter
from specpaged.engine.call_length import CallLength
from specpaged.engine.draft_planner import evidence_of
from specpaged.engine.rounds import _tell_outcomes
from specpaged.modeling.model_runner import ModelRunner
from specpaged.modeling.rounds import DecodingRow, Round, Together
from specpaged.paging.page_table import DRAFT, TARGET
from specpaged.speculation.lookup_choice import LookupChoice
from specpaged.speculation.stop_rule import StopRule
from specpaged.testing.heads import write_clover, write_eagle3
from specpaged_kernels.cpu.ngram_index import NgramIndex, ngram_ref
from specpaged_kernels.cpu.suffix_index import SuffixIndex
from tests import toys
from tests.engine.test_engine import GREEDY

LONGER = {"prompt_lookup_min": 1, "prompt_lookup_max": 6}


def heads_of(pair, method) -> dict:
    """Heads with random weights beside the pair's target, which is not much to accept."""
    path = Path(pair.target).parent / method
    if not path.is_dir():
        config = AutoConfig.from_pretrained(pair.target)
        if method == "eagle3":
            write_eagle3(path, config, aux_layers=(0, 1), draft_vocab_size=20)
        else:
            write_clover(path, config)
    return {"method": method, "model": str(path), "num_speculative_tokens": 3}


KINDS = {
    "plain": lambda pair: {"num_speculative_tokens": 0},
    "draft model": lambda pair: {"model": pair.draft, "num_speculative_tokens": 3},
    "its own draft": lambda pair: {"model": pair.target, "num_speculative_tokens": 4, "numerics": "exact"},
    "ngram": lambda pair: {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3},
    "eagle3": lambda pair: heads_of(pair, "eagle3"),
    "clover": lambda pair: heads_of(pair, "clover"),
    "lookups": lambda pair: {"method": ["ngram", "suffix"], "num_speculative_tokens": 4, **LONGER},
    "draft model and lookups": lambda pair: (
        {"method": ["draft_model", "ngram", "suffix"], "model": pair.draft, "num_speculative_tokens": 3, **LONGER}
    ),
}
COUNTS = (
    "steps", "rounds", "emitted_tokens", "drafts", "draft_tokens", "accepted_tokens", "proposed_tokens", "rollbacks",
    "rolled_back_tokens", "accepted_per_position",
)  # fmt: skip


def decode(pair, kind, num_scheduler_steps, params, **arguments):
    """Outputs, counts, and how many calls for several rounds there were, of which several had some."""
    defaults = {"max_model_len": 96, "max_num_seqs": 3, "block_size": 4}
    llm = LLM(
        pair.target,
        speculative_config=KINDS[kind](pair),
        num_scheduler_steps=num_scheduler_steps,
        **(defaults | arguments),
    )
    step = llm.engine.speculative_step
    if step.reserve_rounds is not None:  # as many as may be, whatever they take
        step.call_length = CallLength(num_scheduler_steps, few=num_scheduler_steps)
    honest, num_rounds = llm.engine.target.rounds, []

    def rounds(*args):
        found = honest(*args)
        num_rounds.append(len(found.rounds))
        return found

    llm.engine.target.rounds = rounds
    prompts = toys.prompts(len(params))
    for i, (prompt, of_request) in enumerate(zip(prompts, params, strict=True)):
        llm.engine.add_request(str(i), prompt["prompt_token_ids"], of_request)
    outputs = {}
    while llm.engine.has_unfinished_requests:
        for output in llm.engine.step():
            outputs[int(output.request_id)] = output
        llm.engine.check_integrity()
        for sequence in llm.engine.scheduler.running:
            table, drafted = sequence.page_table, max(0, len(sequence.draft) - 1)
            assert table.context_lens[TARGET] <= sequence.num_tokens - 1 or not sequence.output_token_ids
            if llm.config.speculative_config.reads_target:
                assert table.context_lens[DRAFT] == table.context_lens[TARGET]
            elif len(table.context_lens) > DRAFT:
                assert table.context_lens[DRAFT] <= sequence.num_tokens + drafted
                caught_up = sequence.draft and not sequence.draft.drafter
                assert table.context_lens[DRAFT] == sequence.num_tokens + drafted or not caught_up
    llm.engine.check_idle()
    metrics = llm.engine.metrics
    told = [
        (o.error, [(c.token_ids, c.finish_reason, c.stop_reason) for c in o.outputs], vars(o.metrics))
        for o in map(outputs.get, range(len(params)))
    ]
    return told, {name: getattr(metrics, name) for name in COUNTS}, num_rounds


@pytest.mark.parametrize("num_scheduler_steps", [2, 4, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_drafts_and_counts_are_those_of_single_steps(toy_pair, kind, num_scheduler_steps):
    """Of a batch that stays together, as single steps let nobody in between."""
    params = [SamplingParams(max_tokens=40, **GREEDY)] * 3
    outputs, counts, num_rounds = decode(toy_pair, kind, 1, params)
    assert not num_rounds
    again, counted, num_rounds = decode(toy_pair, kind, num_scheduler_steps, params)
    assert again == outputs
    assert counted == counts
    assert max(num_rounds) == num_scheduler_steps
    assert sum(count < num_scheduler_steps for count in num_rounds) <= 3  # where one of them ends


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_behind_the_end_of_a_text_are_nobodys(tokenizer_pair, kind):
    """A stop string is found when the call is over: what was decoded behind it is not counted either."""
    (((_, ((ids, _, _),), _),), _, _) = decode(tokenizer_pair, "plain", 1, [SamplingParams(max_tokens=24, **GREEDY)])
    text = LLM(tokenizer_pair.target).engine.vocabulary.tokenizer.decode(ids)
    for at in range(4, len(text) - 2, 5):
        params = [SamplingParams(max_tokens=24, stop=[text[at : at + 2]], **GREEDY)]
        single, counts, _ = decode(tokenizer_pair, kind, 1, params)
        several, counted, _ = decode(tokenizer_pair, kind, 6, params)
        assert several == single
        for name in ("emitted_tokens", "drafts", "draft_tokens", "accepted_tokens", "rollbacks", "rolled_back_tokens"):
            assert counted[name] == counts[name], name


@pytest.mark.parametrize("kind", ["draft model", "ngram"])
def test_who_goes_on_from_rounds_has_the_drafts_that_a_proposal_would_make(toy_pair, monkeypatch, kind):
    """Whoever ends meanwhile: the drafter itself is asked behind the prefill, and where fewer are to have other K."""
    params = [SamplingParams(max_tokens=n, **GREEDY) for n in (17, 29, 40)]
    asked = []
    for drafter in (DraftModelDrafter, NgramDrafter):
        honest = drafter.propose
        monkeypatch.setattr(drafter, "propose", lambda *args, honest=honest: asked.append(1) or honest(*args))
    speculative = KINDS[kind](toy_pair)
    del speculative["num_speculative_tokens"]
    for schedule, most_asked in (([[1, 3, 3]], 1), ([[1, 1, 4], [2, 2, 1], [3, 3, 2]], 3)):
        speculative["num_speculative_tokens_per_batch_size"] = schedule
        monkeypatch.setitem(KINDS, "by size", lambda _: speculative)
        outputs, counts, _ = decode(toy_pair, "by size", 1, params)
        asked.clear()
        again, counted, _ = decode(toy_pair, "by size", 4, params)
        assert again == outputs
        assert counted == counts
        assert 1 <= len(asked) <= most_asked


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("memory", [None, 18], ids=["", "with little memory"])
def test_outputs_are_those_of_single_steps_whoever_comes_and_ends_and_however(tokenizer_pair, kind, memory):
    free, _, _ = decode(tokenizer_pair, "plain", 1, [SamplingParams(max_tokens=24, **GREEDY)] * 8)
    ids = [outputs[0][0] for _, outputs, _ in free]
    params = [
        SamplingParams(max_tokens=5, **GREEDY),
        SamplingParams(max_tokens=24, stop_token_ids=[ids[1][6]], **GREEDY),
        SamplingParams(max_tokens=24, stop=["e", "t"], **GREEDY),
        SamplingParams(max_tokens=24, temperature=0),
        SamplingParams(max_tokens=9, seed=3, temperature=0.8, ignore_eos=True),
        SamplingParams(max_tokens=24, temperature=0),
        SamplingParams(max_tokens=1, **GREEDY),
        SamplingParams(max_tokens=24, min_tokens=4, stop_token_ids=[ids[7][1]], **GREEDY),
    ]
    arguments = {"enable_prefix_caching": True}
    if memory is not None:
        arguments["max_model_len"] = 64
        arguments["kv_cache_memory_bytes"] = memory * 4 * 1024
    single, _, _ = decode(tokenizer_pair, kind, 1, params)
    several, _, num_rounds = decode(tokenizer_pair, kind, 4, params, **arguments)
    assert [told[:2] for told in several] == [told[:2] for told in single]
    assert any(count > 1 for count in num_rounds)


def test_a_row_without_a_most_likely_token_ends_its_request_where_single_steps_would(toy_pair):
    """A token whose embedding is NaN: behind it, nothing can be decoded."""
    params = [SamplingParams(max_tokens=30, **GREEDY)] * 3
    free, _, _ = decode(toy_pair, "plain", 1, params)
    outputs = [tokens[0][0] for _, tokens, _ in free]
    prompts = toys.prompts(3)
    others = {*outputs[0], *outputs[2], *outputs[1][:6]}.union(*(prompt["prompt_token_ids"] for prompt in prompts))
    spoiled = next(token_id for token_id in outputs[1][6:] if token_id not in others)
    place = outputs[1].index(spoiled)
    told = {}
    for steps in (1, 4):
        llm = LLM(toy_pair.target, max_model_len=96, max_num_seqs=3, num_scheduler_steps=steps)
        decoder = llm.engine.target.model.decoder
        embedding = getattr(decoder, "decoder", decoder).embedding
        before = embedding[spoiled].clone()
        embedding[spoiled] = torch.nan
        told[steps] = [(o.error, o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]
        embedding[spoiled] = before
    assert told[4] == told[1]
    assert told[4][1][1] == outputs[1][: place + 1]
    assert "hold NaN" in told[4][1][0]
    assert [ids for _, ids in (told[4][0], told[4][2])] == [outputs[0], outputs[2]]


def empty_runner(pair):
    """A target on KV that is 0: what memory holds that nobody has written to is anything."""
    runner = LLM(pair.target, max_model_len=96, max_num_seqs=2).engine.target
    clear(runner)
    return runner


def clear(*runners):
    for runner in runners:
        for layer in runner.kv_cache.layers:
            layer.zero_()


def test_rounds_that_lead_outside_are_refused_before_anything_is_written(toy_pair):
    runner = empty_runner(toy_pair)
    good = DecodingRow([7], 3, 3, [], 0, 4, (), [1])
    assert runner.rounds([good], 90, 2).rounds
    before = [layer.clone() for layer in runner.kv_cache.layers]
    for name, changes in {
        "token_ids": {"token_ids": [1 << 40]},
        "context_lens": {"most_tokens": 0},
        "page_table": {"blocks": [10**6]},
        "positions": {"start": -1, "draft_context_len": -1},
    }.items():
        with pytest.raises(IndexError, match=f"{name} leads outside"):
            runner.rounds([good._replace(**changes)], 90, 2)
    with pytest.raises(IndexError):
        runner.rounds([good._replace(num_draft_tokens=2)], 90, 2)  # and nobody drafts
    assert all(torch.equal(a, b) for a, b in zip(before, runner.kv_cache.layers, strict=True))


def test_rounds_end_with_the_one_in_which_a_sequence_does(toy_pair):
    runner = empty_runner(toy_pair)
    row = DecodingRow([7], 3, 3, [], 0, 6, (), list(range(1, 3)))
    token_ids = [of_round.token_ids[0][0] for of_round in runner.rounds([row], 90, 9).rounds]
    assert len(token_ids) == 6  # no more may come
    stop_id = token_ids[3]
    stopped = runner.rounds([row._replace(stop_ids=(91, stop_id))], 90, 9).rounds
    assert len(stopped) == token_ids.index(stop_id) + 1


@pytest.mark.parametrize("row_tokens", [None, 0.3, 0.05], ids=["", "rule", "rule that keeps more"])
def test_a_lookup_in_rounds_finds_what_the_drafter_does(toy_pair, row_tokens):
    """Round by round, of tokens that go on as they come; with a rule, as much of it as this says is worth it."""
    runner = empty_runner(toy_pair)
    rule = None if row_tokens is None else StopRule(1.0, [1.0], [0.0], [0.0], row_tokens, 0.0)
    known = [5, 6, 7, 5, 6, 8, 5, 6]
    index = NgramIndex(1, 3)
    index.append(known)
    row = DecodingRow(known, 0, 0, [], 3, 40, (), list(range(1, 7)), index.address)
    num_found = num_kept = 0
    for i, of_round in enumerate(runner.rounds([row], 90, 12, stop_rule=rule).rounds):
        if i > 0:  # the host's drafts are the first round's
            num_left = 40 - (len(known) - 8)
            token_ids, num_matched = ngram_ref(known, 1, 3, min(3, num_left - 1))
            assert of_round.num_drafted == len(token_ids)
            num_found += len(token_ids)
            all_ids = token_ids
            if rule is not None:
                token_ids = token_ids[: rule.num_worth(evidence_of(Draft(token_ids, num_matched=num_matched)), 0)]
            assert of_round.drafts[0] == token_ids
            assert of_round.left_out[0] == all_ids[len(token_ids) :][:1]
            assert of_round.evidence[0] == [num_matched] * len(token_ids + of_round.left_out[0])
            num_kept += len(token_ids)
        known = [*known, *of_round.token_ids[0]]
    assert index.num_tokens == len(known)
    assert index.find((), 5)[0] == ngram_ref(known, 1, 3, 5)[0]
    assert num_found
    assert (num_kept < num_found) == (rule is not None)


@pytest.mark.parametrize("rules", [False, True], ids=["at its word", "by rules"])
@pytest.mark.parametrize("factor", [0.5, 2.0], ids=["short suffixes", "long suffixes"])
@pytest.mark.parametrize("model", [False, True], ids=["no model", "draft model"])
def test_a_lookups_draft_is_taken_where_the_choice_says_so_in_python(toy_pair, rules, factor, model):
    """Of two sequences and two lookups; where it is not, the model drafts as it does without any. What is found and not
    taken is told, as far as tokens have come that say what would have become of it.
    """
    engine = LLM(toy_pair.target, speculative_config={"model": toy_pair.draft}, max_model_len=96, max_num_seqs=3).engine
    draft = engine.draft if model else None
    prompts = [5, 6, 7, 8] * 3, [9, 3, 4, 9]
    both = [
        StopRule(1.0, [1.5, 0.2], [0.5, 1.0], [0.0] * 2, 0.2, 0.0),
        StopRule(0.5, [0.1], [0.3, 0.9], [0.0] * 2, 0.3, 0.0),
    ]
    choices = [LookupChoice(4, 0.1 * model, both if rules else (), row) for row in (1, 0)]
    kept, rows = [], []
    for i, (ids, choice) in enumerate(zip(prompts, choices, strict=True)):
        indexes = NgramIndex(1, 5), SuffixIndex(None, 24, factor, 0.1)
        for index in indexes:
            index.append(ids)
        kept.append(indexes)
        blocks, addresses = list(range(6 * i, 6 * i + 6)), [index.address for index in indexes]
        rows.append(DecodingRow(ids, 0, 0, [], 3 * model, 40, (), blocks, 0, choice, addresses))
    clear(engine.target, engine.draft)
    known, drafters, num_told = [list(ids) for ids in prompts], set(), 0
    for i, of_round in enumerate(engine.target.rounds(rows, 90, 9, draft=draft, tells_found=True).rounds):
        assert i or of_round.found == [[], []]
        for j, choice in enumerate(choices if i else ()):
            num_left = 40 - (len(known[j]) - len(prompts[j]))
            count = min(4, num_left - 1)
            token_ids, num_matched = ngram_ref(known[j], 1, 5, count)
            suffix = SuffixIndex(None, 24, factor, 0.1)
            suffix.append(known[j])
            drafts = [Draft(token_ids, num_matched=num_matched), Draft(*suffix.find((), count))]
            taken, num_taken = choice.choose([evidence_of(draft) for draft in drafts])
            assert of_round.drafters[j] == (1 + taken if num_taken else 0)
            drafters.add(of_round.drafters[j])
            found = [(1, token_ids, [num_matched] * len(token_ids)), (2, drafts[1].token_ids, drafts[1].logprobs)]
            num_known = len(of_round.token_ids[j])
            expected = [(k, ids[:num_known], evidence[:num_known]) for k, ids, evidence in found if ids]
            assert of_round.found[j] == [told for told in expected if told[0] != of_round.drafters[j]]
            num_told += len(of_round.found[j])
            if num_taken:
                draft = drafts[taken]
                assert of_round.drafts[j] == draft.token_ids[:num_taken]
                assert of_round.left_out[j] == draft.token_ids[num_taken:][:1]
                told = [num_matched] * len(draft) if draft.logprobs is None else draft.logprobs
                assert of_round.evidence[j] == told[: num_taken + 1]
            else:
                assert len(of_round.drafts[j]) == min(3 * model, num_left - 1)
        known = [[*ids, *new] for ids, new in zip(known, of_round.token_ids, strict=True)]
    assert num_told or factor < 1
    assert 0 in drafters
    assert drafters >= {1 if factor < 1 else 2}
    assert [index.num_tokens for indexes in kept for index in indexes] == [len(ids) for ids in known for _ in range(2)]


def test_a_choice_that_leads_outside_is_refused(toy_pair):
    runner, index = empty_runner(toy_pair), NgramIndex(1, 3)
    index.append([7])
    row = DecodingRow([7], 3, 3, [], 0, 4, (), [1], 0, LookupChoice(2), [index.address])
    assert runner.rounds([row], 90, 2).rounds
    rule = StopRule(1.0, [0.0], [0.0], [0.0], 0.0, 0.0)
    for wrong in (row._replace(choice=LookupChoice(2, 0.0, [rule], 1)), row._replace(lookups=[0])):
        with pytest.raises(IndexError):
            runner.rounds([wrong], 90, 2)


def test_a_rule_leaves_out_drafts_that_are_not_worth_their_rows(toy_pair):
    """Of two sequences that want drafts, beside one that does not: by what it says of each one's evidence, in Python.

    With the same drafts before them, rounds with and without it draft alike.
    """
    engine = LLM(toy_pair.target, speculative_config={"model": toy_pair.draft}, max_model_len=96, max_num_seqs=3).engine
    rows = [
        DecodingRow(ids, 0, 0, [], 4 * (i != 1), 24, (), list(range(6 * i, 6 * i + 6)))
        for i, ids in enumerate(([5, 6, 7, 5, 6, 8, 5, 6], [9, 3, 4], [1, 2, 1, 2, 3, 1, 2]))
    ]
    clear(engine.target, engine.draft)
    without = engine.target.rounds(rows, 90, 2, draft=engine.draft).rounds[1]
    num_kept = []
    for slope, row_tokens in ((1.0, 0.02), (1.0, 0.1), (0.5, 0.3), (0.5, 0.9)):
        rule = StopRule(slope, [0.5, 0.0], [1.0, -1.0], [1.0, 1.0], row_tokens, pass_tokens=-1.0)
        clear(engine.target, engine.draft)
        found = engine.target.rounds(rows, 90, 2, draft=engine.draft, stop_rule=rule).rounds[1]
        for row, i in enumerate((0, 2)):
            num_kept.append(rule.num_worth(evidence_of(Draft(without.drafts[i], without.evidence[i])), row))
            assert found.drafts[i] == without.drafts[i][: num_kept[-1]]
            assert found.left_out[i] == without.drafts[i][num_kept[-1] :][:1]  # the first one alone
            assert found.evidence[i] == without.evidence[i][: num_kept[-1] + 1]
        assert found.drafts[1] == found.left_out[1] == []
        assert found.num_drafted == without.num_drafted == 8
    assert 0 in num_kept
    assert max(num_kept) >= 3


def test_a_rule_that_was_made_for_others_is_not_asked(toy_pair):
    engine = LLM(toy_pair.target, speculative_config={"model": toy_pair.draft}, max_model_len=96, max_num_seqs=3).engine
    row = DecodingRow([5, 6, 7], 0, 0, [], 3, 40, (), list(range(6)))
    never = StopRule(1.0, [0.0], [-9.0, -9.0], [0.0, 0.0], 1.0, -1.0)
    for rule, num_drafts in ((never, 3), (never.of_rows([0]), 0)):
        clear(engine.target, engine.draft)
        rounds = engine.target.rounds([row], 90, 2, draft=engine.draft, stop_rule=rule).rounds
        assert len(rounds[1].drafts[0]) == num_drafts


def test_of_drafts_that_a_rule_left_out_the_first_one_is_told():
    told = []
    step = SimpleNamespace(
        drafter=SimpleNamespace(in_rounds=None),
        planner=SimpleNamespace(told=lambda sequence, draft, token_ids: told.append((sequence, draft, token_ids))),
    )
    rounds = [
        Round([[1], []], [[], []], [[0.0], []], [[1, 2], [3]], 0),  # the host's own: it knows
        Round([[4], []], [[5], []], [[-0.1, -0.2], []], [[4, 6], [7]], 3),
        Round([[], []], [[8], []], [[-0.3], []], [[8], [9]], 3),
    ]
    entries = [SimpleNamespace(sequence="a"), SimpleNamespace(sequence="b")]
    _tell_outcomes(step, SimpleNamespace(entries=entries, rounds=SimpleNamespace(rounds=rounds)))
    assert told == [("a", Draft([4, 5], [-0.1, -0.2]), [4, 6]), ("a", Draft([8], [-0.3]), [8])]


def test_what_lookups_have_found_is_told_whether_or_not_it_was_taken():
    told = []
    ngram, suffix = NgramDrafter(1, 3).in_rounds, SuffixDrafter(24, 9, 1.0, 0.1).in_rounds
    step = SimpleNamespace(
        drafter=SimpleNamespace(in_rounds=Together(None, [ngram, suffix])),
        planner=SimpleNamespace(told=lambda sequence, draft, token_ids: told.append((sequence, draft, token_ids))),
    )
    rounds = [
        Round([[1], []], [[], []], [[0.0], []], [[1, 2], [3]], 0, (0, 0), [[], []]),
        Round([[4], []], [[5], []], [[-0.1, -0.2], []], [[4, 6], [7]], 3, (2, 0), [[(1, [4, 9], [3.0] * 2)], []]),
        Round([[8], []], [[], []], [[-0.3], []], [[8], [9]], 3, (0, 0), [[(2, [1], [-0.5])], [(1, [2], [4.0])]]),
    ]
    entries = [SimpleNamespace(sequence="a"), SimpleNamespace(sequence="b")]
    _tell_outcomes(step, SimpleNamespace(entries=entries, rounds=SimpleNamespace(rounds=rounds)))
    taken, besides = Draft([4, 5], [-0.1, -0.2], drafter=2), Draft([4, 9], num_matched=3, drafter=1)
    assert told == [
        ("a", Draft(found=[taken, besides]), [4, 6]),
        ("a", Draft([8], [-0.3], found=[Draft([1], [-0.5], drafter=2)]), [8]),
        ("b", Draft(found=[Draft([2], num_matched=4, drafter=1)]), [9]),
    ]


def test_a_backlog_that_one_pass_of_the_draft_does_not_hold_is_no_matter_of_rounds(toy_pair, monkeypatch):
    """Where lookups' drafts are taken, the model falls behind with each, and catches up when it drafts again."""
    backlogs, honest = [], ModelRunner.rounds

    def rounds(runner, rows, *args):
        backlogs.append(sum(len(row.token_ids) for row in rows if row.num_draft_tokens))
        return honest(runner, rows, *args)

    monkeypatch.setattr(ModelRunner, "rounds", rounds)
    params = [SamplingParams(max_tokens=60, **GREEDY)] * 3
    *expected, num_rounds = decode(toy_pair, "draft model and lookups", 4, params)
    most = max(backlogs)
    assert most > len(params)
    backlogs.clear()
    monkeypatch.setattr("specpaged.engine.rounds.MOST_ROWS", most - 1)
    *found, fewer = decode(toy_pair, "draft model and lookups", 4, params)
    assert found == expected
    assert max(backlogs) < most
    assert sum(fewer) < sum(num_rounds)
