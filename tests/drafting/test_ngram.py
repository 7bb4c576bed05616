"""Prompt lookup: what is found, and that whatever is found changes nothing but speed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specpaged import LLM, SamplingParams, SpeculativeConfig
from specpaged.drafting import ngram
from specpaged.drafting.base import DraftRow
from specpaged.drafting.ngram import NgramDrafter, NgramIndexes
from specpaged.sampling.batch import SamplingBatch
from specpaged.sampling.request import SamplingRequest
from specpaged_kernels.cpu.ngram_index import NgramIndex, ngram_ref
from tests import toys

A, B, C, D = range(4)
CONFIG = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def test_the_worked_example_of_the_docstring():
    assert ngram_ref([A, B, C, D, A, B], 2, 2, 5) == ([C, D, A, B, C], 2)


def told(found):
    """Of drafts, with what is known of each: the drafts, and the n that all of them have."""
    token_ids, evidence = found
    assert len(set(evidence)) == bool(token_ids)
    return token_ids, int(evidence[0]) if evidence else 0


def lookup_slowly(token_ids, shortest, longest, count):
    for n in range(longest, shortest - 1, -1):
        for start in range(len(token_ids) - n - 1, -1, -1):
            if token_ids[start : start + n] == token_ids[-n:]:
                found = list(token_ids)
                for i in range(count):
                    found.append(found[start + n + i])
                return found[len(token_ids) :], n
    return [], 0


@given(
    token_ids=st.lists(st.sampled_from([0, 1, 255, 256, 65536, 257]), min_size=1, max_size=40),
    shortest=st.integers(1, 3),
    more=st.integers(0, 3),
    count=st.integers(1, 9),
)
def test_the_longest_match_nearest_to_the_end_is_taken(token_ids, shortest, more, count):
    """Ids whose bytes look alike across tokens."""
    expected = lookup_slowly(token_ids, shortest, shortest + more, count)
    assert ngram_ref(token_ids, shortest, shortest + more, count) == expected


@given(
    texts=st.lists(st.lists(st.integers(-1, 2), max_size=60), max_size=6),
    shortest=st.integers(1, 3),
    more=st.integers(0, 3),
    count=st.integers(1, 9),
)
def test_an_index_of_a_text_that_grows_finds_what_is_found_in_all_of_it(texts, shortest, more, count):
    """Whatever comes at once; and with a text that is another one, or shorter than it was, it begins anew."""
    indexes, known = NgramIndexes(shortest, shortest + more), []
    for text in texts:
        known += text
        expected = ngram_ref(known, shortest, shortest + more, count)
        for further in range(0, len(text) + 1, 7):
            first = len(known) - further
            assert told(indexes.up_to_date("one", known[:first], known[first:]).find((), count)) == expected
        shorter = known[: len(known) // 2]
        assert indexes.up_to_date("another", shorter).num_tokens == len(shorter)
    indexes.forget("one")
    assert indexes.up_to_date("one", [A, B]).num_tokens == 2


def test_of_a_long_text_an_index_finds_every_place():
    """Of so many n-grams that its tables have grown several times."""
    index, known = NgramIndex(2, 4), [i * i % 1009 for i in range(3000)]
    for i in range(0, len(known), 250):
        index.append(known[i : i + 250])
    for last in ([5, 5, 5], known[500:503], [7, *known[2000:2002]], known[-4:]):
        known += last
        assert told(index.find(last, 6)) == ngram_ref(known, 2, 4, 6)


@pytest.mark.parametrize("has_library", [True, False])
def test_each_request_gets_as_many_drafts_as_its_row_asks_for(monkeypatch, has_library):
    """In any order of the rows; output tokens are looked at, too."""
    monkeypatch.setattr(ngram, "why_no_indexes", lambda: None if has_library else "there is no compiler")
    params = SamplingParams(temperature=0)
    requests = [SamplingRequest(params, 0, [A, B, C, D], [A, B]), SamplingRequest(params, 0, [A], [B])]
    rows = [DraftRow("b", (), 0, (), 2, 1), DraftRow("a", (), 0, (), 3, 0)]
    drafts = NgramDrafter(1, 2).propose(rows, SamplingBatch(requests, 4, "cpu"))
    assert [list(draft.token_ids) for draft in drafts] == [[C, D, A], []]
    assert [draft.num_matched for draft in drafts] == [2, 0]


def test_outputs_are_those_of_plain_decoding_and_drafts_are_accepted(toy_pair):
    prompts = [*toys.prompts(5, seed=4), {"prompt_token_ids": [7, 8, 9] * 6}]
    params = [
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.7, seed=3, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=12, logprobs=1, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, extra_args={"num_speculative_tokens": 0}),
        SamplingParams(temperature=0, max_tokens=9, repetition_penalty=1.1, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
    ]
    outputs = {}
    for config in (None, CONFIG, {**CONFIG, "verification": "rejection"}):
        llm = LLM(toy_pair.target, speculative_config=config, max_model_len=64, max_num_seqs=4)
        of_config = params if config else [replace(p, extra_args=None) for p in params]
        greedy = [i for i, p in enumerate(params) if p.greedy]
        results = llm.generate(prompts, of_config, use_tqdm=False)
        tokens = [result.outputs[0].token_ids for result in results]
        outputs[str(config)] = [tokens[i] for i in greedy] if config and "verification" in config else tokens
        assert llm.engine.num_pools == 1
        assert llm.engine.allocator.num_held == 0
        if config:
            assert llm.metrics.accepted_tokens > 0
            assert "by prompt lookup of 1 to 3 tokens" in str(llm.report)
    plain, coupled, rejection = outputs.values()
    assert coupled == plain
    assert rejection == [tokens for tokens, p in zip(plain, params, strict=True) if p.greedy]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "ngram", "model": "draft"}, r"\['model'\]='draft' is for methods 'draft_model'"),
        (
            {"method": "ngram", "kv_cache_dtype": "float16"},
            r"\['kv_cache_dtype'\]='float16' is for methods with a model",
        ),
        ({"method": "ngram", "prompt_lookup_min": 0}, r"\['prompt_lookup_min'\]=0 must be an int >= 1"),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 2}, "=4 must be at most prompt_lookup_max=2"),
        ({"prompt_lookup_max": 2}, r"\['prompt_lookup_max'\]=2 is for method 'ngram' alone; method='draft_model'"),
        ({"method": "medusa"}, r"\['method'\]='medusa' is not known; allowed: 'draft_model', "),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(config, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig.from_mapping(config)


def test_a_length_said_alone_serves_as_both():
    for given_lengths, expected in (
        ({}, (5, 5)),
        ({"prompt_lookup_max": 3}, (3, 3)),
        ({"prompt_lookup_min": 2}, (2, 2)),
    ):
        config = SpeculativeConfig(method="ngram", **given_lengths)
        assert (config.prompt_lookup_min, config.prompt_lookup_max) == expected
