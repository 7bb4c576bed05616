import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specpaged.sampling import processors
from specpaged.sampling.processors import process_rows
from specpaged.sampling.processors_ref import process_row_ref
from specpaged.sampling.request import Row, SamplingRequest
from specpaged.sampling_params import SamplingParams

V = 12
NEG_INF = float("-inf")
token = st.integers(0, V - 1)
tokens = st.lists(token, max_size=6)
# A coarse grid makes ties common.
logit = st.one_of(st.sampled_from([-4.0, -1.0, 0.0, 1.0, 1.5, 3.0]), st.floats(-30, 30, width=32))


@st.composite
def rows_of_logits(draw):
    num_outputs = draw(st.integers(0, 6))
    params = SamplingParams(
        temperature=draw(st.sampled_from([0, 0.3, 0.8, 1.0, 1.7])),
        top_p=draw(st.sampled_from([1.0, 1e-6, 0.3, 0.5, 0.9, 0.999])),
        top_k=draw(st.sampled_from([0, 1, 2, 5, V - 1, V, V + 7])),
        min_p=draw(st.sampled_from([0.0, 0.05, 0.5, 1.0])),
        min_tokens=draw(st.integers(0, 8)),
        presence_penalty=draw(st.sampled_from([0.0, 0.7, -1.3])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.3, -0.9])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.6])),
        logit_bias=draw(st.none() | st.dictionaries(token, st.sampled_from([-100.0, -2.5, 4.0]), max_size=4)),
        allowed_token_ids=draw(st.none() | st.lists(token, min_size=1, max_size=8)),
    )
    drafts = draw(st.lists(token, max_size=4))
    mask = draw(st.none() | st.lists(st.lists(st.booleans(), min_size=V, max_size=V), min_size=5, max_size=5))
    request = SamplingRequest(
        params=params,
        seed=0,
        prompt_token_ids=draw(st.lists(token, min_size=1, max_size=6)),
        output_token_ids=draw(st.lists(token, min_size=num_outputs, max_size=num_outputs)),
        stop_ids=tuple(draw(st.lists(token, max_size=3))),
        token_mask=None if mask is None else torch.tensor(mask),
        bad_words_ids=tuple(tuple(w) for w in draw(st.lists(st.lists(token, min_size=1, max_size=3), max_size=4))),
    )
    logits = draw(st.lists(st.one_of(logit, st.just(NEG_INF)), min_size=V, max_size=V))
    if draw(st.integers(0, 19)) == 0:
        logits[draw(token)] = float("nan")
    return logits, Row(request, drafts)


def same_bits(a, b):
    return torch.equal(a.nan_to_num(nan=12345.0), b.nan_to_num(nan=12345.0))


@settings(max_examples=80)
@given(st.lists(rows_of_logits(), min_size=1, max_size=5), st.sampled_from([2, 5, 1024]))
def test_vectorised_processing_equals_the_reference(drawn, first_width):
    logits = torch.tensor([values for values, _ in drawn], dtype=torch.float32)
    before = logits.clone()
    rows = [row for _, row in drawn]
    original, processors._FIRST_WIDTH = processors._FIRST_WIDTH, first_width  # 2: the whole vocabulary often counts
    try:
        processed = process_rows(logits, rows)
    finally:
        processors._FIRST_WIDTH = original
    assert same_bits(logits, before)
    for r, row in enumerate(rows):
        assert same_bits(processed[r], process_row_ref(logits[r], row)), row
        if not row.request.needs_processing and not bool(logits[r].isnan().any()):
            assert same_bits(processed[r], logits[r])


@pytest.mark.parametrize("first_width", [1, 3, 6, 1024])
def test_top_k_and_top_p_equal_the_reference_however_many_are_sorted_first(first_width, monkeypatch):
    # All pairs of them as one batch, and each alone: a mate's top_k widens what is sorted first.
    monkeypatch.setattr(processors, "_FIRST_WIDTH", first_width)
    kinds = [(k, p) for k in (0, 1, 2, 4, 7, V) for p in (0.01, 0.4, 0.7, 0.9, 0.99, 1.0)]
    rows = [Row(SamplingRequest(SamplingParams(top_k=k, top_p=p), 0, [], []), []) for k, p in kinds]
    generator = torch.Generator().manual_seed(0)
    for spread in (1, 3, 8):  # of a grid: ties abound
        logits = torch.randint(-spread, spread + 1, (len(rows), V), generator=generator) / 2
        logits[torch.rand(logits.shape, generator=generator) < 0.1] = NEG_INF
        together = process_rows(logits, rows)
        for r, row in enumerate(rows):
            expected = process_row_ref(logits[r], row)
            assert torch.equal(together[r], expected), row
            assert torch.equal(process_rows(logits[r : r + 1], [row])[0], expected), row


def process(logits, drafts=(), prompt=(1,), outputs=(), stop_ids=(), bad_words_ids=(), token_mask=None, **params):
    params.setdefault("temperature", 0)
    request = SamplingRequest(
        SamplingParams(**params), 0, list(prompt), list(outputs), tuple(stop_ids), token_mask, tuple(bad_words_ids)
    )
    return process_rows(torch.tensor([logits]), [Row(request, list(drafts))])[0].tolist()


def kept(values):
    return [v for v, x in enumerate(values) if x > NEG_INF]


def test_repetition_penalty_counts_the_prompt_the_other_two_do_not():
    got = process([2.0, -2.0, 1.0, -1.0], prompt=[0, 1], outputs=[2, 2], drafts=[3], repetition_penalty=2.0)
    assert got == [1.0, -4.0, 0.5, -2.0]
    assert process([2.0, 2.0, 2.0], prompt=[0], outputs=[1, 1], drafts=[1], frequency_penalty=0.5) == [2, 0.5, 2]
    assert process([2.0, 2.0, 2.0], prompt=[0], outputs=[1, 1], drafts=[1], presence_penalty=0.5) == [2, 1.5, 2]


def test_penalties_see_the_drafts_before_the_row_only():
    request = SamplingRequest(SamplingParams(frequency_penalty=1.0), 0, [0], [1])
    logits = torch.zeros(3, 4)
    drafts = [2, 2]
    got = process_rows(logits, [Row(request, drafts[:j]) for j in range(3)])
    assert got.tolist() == [[0, -1, 0, 0], [0, -1, -1, 0], [0, -1, -2, 0]]


def test_the_order_is_bias_then_penalties_then_temperature():
    got = process(
        [1.0, 0.0], outputs=[0], logit_bias={0: 3.0}, repetition_penalty=2.0, presence_penalty=1.0, temperature=0.5
    )
    assert got[0] == ((1.0 + 3.0) / 2.0 - 1.0) / 0.5


def test_min_tokens_rules_out_stop_ids_until_enough_tokens_are_there():
    for outputs, drafts, ruled_out in [([], [], True), ([0], [0], True), ([0, 0], [0], False), ([0] * 3, [], False)]:
        got = process([0.0] * 4, outputs=outputs, drafts=drafts, stop_ids=[1, 3], min_tokens=3)
        assert kept(got) == ([0, 2] if ruled_out else [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("outputs", "drafts", "expected"),
    [
        ([], [], [0, 1, 2]),
        ([0, 1], [], [0, 1]),
        ([0], [1], [0, 1]),
        ([], [0, 1], [0, 1]),
        ([], [0, 1, 1], [0, 1, 2]),
        ([1], [], [0, 1, 2]),
    ],
)
def test_a_bad_words_last_token_is_ruled_out_after_the_others_in_the_output(outputs, drafts, expected):
    # The prompt ends in the word's beginning: that does not count.
    got = process([0.0] * 4, prompt=[0, 1], outputs=outputs, drafts=drafts, bad_words_ids=[(0, 1, 2), (3,)])
    assert kept(got) == expected


def test_allowed_ids_and_the_token_mask_both_hold():
    mask = torch.tensor([[True, True, False, False], [False, True, True, True]])
    assert kept(process([0.0] * 4, token_mask=mask)) == [0, 1]
    assert kept(process([0.0] * 4, token_mask=mask, drafts=[0])) == [1, 2, 3]
    assert kept(process([0.0] * 4, token_mask=mask, drafts=[0], allowed_token_ids=[0, 3])) == [3]


def test_top_k_keeps_exactly_k_and_of_equals_the_lowest_ids():
    assert kept(process([1.0, 2.0, 1.0, 1.0], temperature=1, top_k=2)) == [0, 1]
    assert kept(process([1.0, 1.0, 1.0, 2.0], temperature=1, top_k=3)) == [0, 1, 3]


def test_top_p_keeps_the_fewest_tokens_that_reach_p():
    logits = [math.log(p) for p in (0.1, 0.5, 0.25, 0.15)]
    for p, expected in [(0.3, [1]), (0.49, [1]), (0.6, [1, 2]), (0.8, [1, 2, 3]), (0.95, [0, 1, 2, 3])]:
        assert kept(process(logits, temperature=1, top_p=p)) == expected
    assert kept(process([0.0] * 4, temperature=1, top_p=0.5)) == [0, 1]
    assert kept(process([0.0] * 4, temperature=1, top_p=1e-9)) == [0]


def test_top_p_is_taken_of_what_top_k_leaves():
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert kept(process(logits, temperature=1, top_p=0.55)) == [0, 1]
    assert kept(process(logits, temperature=1, top_p=0.55, top_k=2)) == [0]


def test_min_p_is_relative_to_the_likeliest_token():
    logits = [math.log(p) for p in (0.5, 0.3, 0.14, 0.06)]
    assert kept(process(logits, temperature=1, min_p=0.2)) == [0, 1, 2]
    assert kept(process(logits, temperature=1, min_p=1.0)) == [0]


def test_nan_behind_a_mask_still_fails_the_row():
    got = process([float("nan"), 1.0], allowed_token_ids=[1])
    assert all(math.isnan(x) for x in got)


@pytest.mark.parametrize(("vocab_size", "threads"), [(2048, 1), (2048, 2), (50_257, 1), (151_936, 1), (151_936, 2)])
def test_a_row_is_processed_alike_alone_and_among_47_others(vocab_size, threads):
    torch.set_num_threads(threads)
    try:
        generator = torch.Generator().manual_seed(vocab_size)
        # A padded embedding is cut: rows lie further apart than they are long. Flat rows need more than 1024 tokens.
        logits = torch.randn(48, vocab_size + 5, generator=generator)[:, :vocab_size]
        logits = logits * torch.linspace(0.3, 4, 48).unsqueeze(-1)
        kinds = [
            {"temperature": 0.7, "top_p": 0.9},
            {"temperature": 1.3, "top_k": 50, "top_p": 0.8, "repetition_penalty": 1.2},
            {"temperature": 0.9, "min_p": 0.02, "presence_penalty": 0.5, "frequency_penalty": 0.1},
            {"temperature": 0},
            {"temperature": 0.8, "top_k": 2000, "logit_bias": {5: 3.0}},
        ]
        rows = []
        for r in range(48):
            history = torch.randint(0, vocab_size, (40,), generator=generator).tolist()
            rows.append(Row(SamplingRequest(SamplingParams(**kinds[r % 5]), r, history[:20], history[20:]), [3, 5]))
        together = process_rows(logits, rows)
        for first, count in [(0, 1), (1, 1), (2, 1), (4, 1), (45, 1), (41, 6)]:
            part = slice(first, first + count)
            assert torch.equal(process_rows(logits[part], rows[part]), together[part])
    finally:
        torch.set_num_threads(1)
