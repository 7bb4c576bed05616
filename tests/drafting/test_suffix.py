"""Suffix decoding: what is counted, and that whatever is drafted changes nothing but speed."""

from __future__ import annotations

from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specpaged import LLM, SamplingParams, SpeculativeConfig
from specpaged.drafting import suffix
from specpaged.drafting.suffix import SuffixDrafter, SuffixIndexes
from specpaged_kernels.cpu.suffix_index import SuffixIndex, SuffixTexts, suffix_ref
from tests import toys

A, B, C, D, E = range(5)
# No more tokens in all than places of a chain are looked at, which the reference has no end of.
TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=10), max_size=3)
COUNTED = {"method": "suffix", "num_speculative_tokens": 4}


def test_the_worked_example_of_the_cpp_file():
    index = SuffixIndex(None, depth=2, max_factor=4.0, min_probability=0.1)
    index.append([A, B, C, D, B, C, E, B, C, E])
    token_ids, evidence = index.find([B, C], 3)
    assert token_ids == [E, B, C]
    assert evidence == pytest.approx([log(2 / 4), log(2 / 3), log(2 / 3)])


@given(
    own=st.lists(st.lists(st.integers(0, 3), max_size=8), min_size=1, max_size=4),
    others=TEXTS,
    count=st.integers(0, 6),
    depth=st.integers(1, 10),
    max_factor=st.sampled_from([0.0, 0.5, 1.0, 2.5]),
    min_probability=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
def test_what_most_places_go_on_with_is_found(own, others, count, depth, max_factor, min_probability):
    """However the text comes, and whatever texts have ended by then."""
    texts = SuffixTexts(8)
    index = SuffixIndex(texts, depth, max_factor, min_probability)
    known = []
    for i, new in enumerate(own):
        if i < len(others):
            texts.add(others[i])
        known += new
        expected = suffix_ref([[known], others[: i + 1]], count, depth, max_factor, min_probability)
        token_ids, evidence = index.find(new, count)
        assert (token_ids, evidence) == (expected[0], pytest.approx(expected[1]))
    assert index.num_tokens == len(known)


@given(others=st.lists(st.lists(st.integers(0, 3), max_size=9), max_size=12), most=st.integers(1, 3))
def test_of_texts_that_have_ended_the_newest_count(others, most):
    texts = SuffixTexts(most)
    index = SuffixIndex(texts, 4, 2.0, 0.0)
    index.append([A, B])
    for num, text in enumerate(others, 1):
        texts.add(text)
        kept = others[max(0, num - most) : num]
        assert index.find((), 5)[0] == suffix_ref([[[A, B]], kept], 5, 4, 2.0, 0.0)[0]


class Request:
    """As much of a sequence as a drafter looks at when it ends."""

    def __init__(self, output_token_ids, has_ended=True):
        self.output_token_ids = output_token_ids
        self.has_ended = has_ended


@pytest.mark.parametrize("drafts", [True, False])
def test_what_one_request_has_put_out_is_drafted_for_the_next_when_it_has_ended(drafts):
    indexes = SuffixIndexes(8, 10, 4.0, 0.1)
    first, second = Request([A, B, C, D]), Request([A, B])
    if drafts:
        indexes.up_to_date(first, [E, E], first.output_token_ids)
    assert indexes.up_to_date(second, [E], second.output_token_ids).find((), 2) == ([], [])
    indexes.forget(first)
    assert indexes.num_sequences == 1
    assert indexes.up_to_date(second, [E], second.output_token_ids).find((), 2)[0] == [C, D]


def test_what_a_preempted_request_has_put_out_counts_once():
    """Its own index has it again when it goes on."""
    indexes = SuffixIndexes(8, 10, 4.0, 0.1)
    first, second = Request([A, B, C, D], has_ended=False), Request([A, B])
    indexes.up_to_date(first, [E, E], first.output_token_ids)
    indexes.forget(first)
    assert indexes.up_to_date(second, [E], second.output_token_ids).find((), 2) == ([], [])


def test_without_the_library_there_is_none(monkeypatch):
    monkeypatch.setattr(suffix, "why_no_indexes", lambda: "there is no compiler")
    with pytest.raises(ValueError, match="there is no compiler; allowed here: method 'ngram'"):
        SuffixDrafter(24, 10, 1.0, 0.1)


@pytest.mark.parametrize("k", [4, "auto"])
def test_outputs_are_those_of_plain_decoding_and_drafts_are_accepted(toy_pair, k):
    """Twice the same prompts: what came of the first ones is known for the others."""
    prompts = [*toys.prompts(4, seed=4), {"prompt_token_ids": [7, 8, 9] * 6}] * 2
    params = [
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.7, seed=3, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=12, logprobs=1, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=9, repetition_penalty=1.1, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
    ] * 2
    outputs = {}
    for config in (None, COUNTED | {"num_speculative_tokens": k}, COUNTED | {"verification": "rejection"}):
        llm = LLM(toy_pair.target, speculative_config=config, max_num_seqs=3)
        outputs[str(config)] = llm.generate(prompts, params, use_tqdm=False)
        if config is not None:
            assert llm.engine.speculative_step.drafter.in_rounds.num_sequences == 0
            if config.get("verification") is None and k == 4:
                greedy = outputs[str(config)][-1].metrics
                assert greedy.accepted_tokens > 10
    plain, *others = [[output.outputs[0].token_ids for output in of] for of in outputs.values()]
    assert others[0] == plain
    is_greedy = [of_request.temperature == 0 for of_request in params]
    assert [ids for ids, yes in zip(others[1], is_greedy, strict=True) if yes] == [
        ids for ids, yes in zip(plain, is_greedy, strict=True) if yes
    ]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"suffix_decoding_max_tree_depth": 0}, "max_tree_depth.*must be an int >= 1"),
        ({"suffix_decoding_max_cached_requests": -1}, "max_cached_requests.*must be an int >= 0"),
        ({"suffix_decoding_max_spec_factor": -0.5}, "max_spec_factor.*-0.5 must be a number; allowed: 0 or more"),
        ({"suffix_decoding_min_token_prob": 1.5}, "min_token_prob.*1.5 must be a number; allowed: 0 to 1"),
        ({"prompt_lookup_min": 2}, "prompt_lookup_min.*is for method 'ngram' alone"),
        ({"model": "a/draft"}, "method 'suffix' has none"),
        ({"kv_cache_dtype": "bfloat16"}, "method 'suffix' has no KV"),
        ({"method": "ngram", "suffix_decoding_max_tree_depth": 8}, "is for method 'suffix' alone"),
    ],
)
def test_a_wrong_option_is_named(config, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig(**({"method": "suffix"} | config))


def test_defaults_are_vllms():
    config = SpeculativeConfig(method="suffix")
    assert config.suffix_decoding_max_tree_depth == 24
    assert config.suffix_decoding_max_cached_requests == 10_000
    assert config.suffix_decoding_max_spec_factor == 1.0
    assert config.suffix_decoding_min_token_prob == 0.1
