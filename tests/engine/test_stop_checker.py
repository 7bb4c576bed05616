"""When a sequence ends, why, and with which text."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specpaged.engine.detokenizer import IncrementalDetokenizer
from specpaged.engine.sequence import Sequence
from specpaged.engine.stop_checker import StopChecker
from specpaged.sampling_params import SamplingParams


def run(tokenizer, ids, eos=None, room=1000, prompt=(), **params):
    """Feed ids until the end: (how many were fed, finish_reason, stop_reason, text)."""
    params.setdefault("max_tokens", 500)
    eos = (tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<eot>")) if eos is None else eos
    checker = StopChecker(SamplingParams(**params), eos, tokenizer, room, prompt)
    fed = 0
    for token_id in ids:
        fed += 1
        if checker.append(token_id) is not None:
            break
    return fed, checker.finish_reason, checker.stop_reason, checker.text


def test_without_a_stop_the_text_is_the_decoded_text(tokenizer, corpus):
    ids = tokenizer.encode(corpus)
    assert run(tokenizer, ids) == (len(ids), None, None, corpus)


def test_eos_ends_the_text_before_it(tokenizer):
    ids = tokenizer.encode("the cat<eos> sat")
    fed, reason, stop, text = run(tokenizer, ids)
    assert (ids[fed - 1], reason, stop, text) == (tokenizer.eos_token_id, "stop", None, "the cat")


def test_a_further_eos_id_is_its_own_stop_reason(tokenizer):
    eot = tokenizer.convert_tokens_to_ids("<eot>")
    assert run(tokenizer, tokenizer.encode("the cat<eot> sat"))[1:] == ("stop", eot, "the cat")


def test_ignore_eos_goes_on_but_not_past_stop_token_ids(tokenizer):
    ids = tokenizer.encode("the<eos> cat<eot> sat")
    assert run(tokenizer, ids, ignore_eos=True)[1:] == (None, None, "the cat sat")
    eot = tokenizer.convert_tokens_to_ids("<eot>")
    assert run(tokenizer, ids, ignore_eos=True, stop_token_ids=[eot])[1:] == ("stop", eot, "the cat")


def test_a_stop_token_is_part_of_the_text_only_where_asked_for(tokenizer):
    ids = tokenizer.encode("the cat sat on")
    stop = ids[-1]
    before, all_of_it = tokenizer.decode(ids[:-1]), tokenizer.decode(ids)
    assert run(tokenizer, ids, stop_token_ids=[stop])[1:] == ("stop", stop, before)
    got = run(tokenizer, ids, stop_token_ids=[stop], include_stop_str_in_output=True)
    assert got[1:] == ("stop", stop, all_of_it)


def test_a_stop_string_that_spans_tokens_cuts_the_text_before_it(tokenizer):
    ids = tokenizer.encode("the cat sat on the mat; STOP the cat")
    assert len(tokenizer.encode("mat; STOP")) > 2
    fed, reason, stop, text = run(tokenizer, ids, stop="mat; ST")
    assert (reason, stop, text) == ("stop", "mat; ST", "the cat sat on the ")
    assert "mat; ST" in tokenizer.decode(ids[:fed])
    assert "mat; ST" not in tokenizer.decode(ids[: fed - 1])
    assert run(tokenizer, ids, stop="mat; ST", include_stop_str_in_output=True)[3] == "the cat sat on the mat; ST"


def test_a_stop_string_inside_a_token_cuts_the_token(tokenizer):
    ids = tokenizer.encode("sat on the cat")
    inside = next(i for i in ids if len(tokenizer.decode([i])) >= 4)
    token = tokenizer.decode([inside])
    before = tokenizer.decode(ids[: ids.index(inside)])
    stop = token[1:-1]
    assert stop not in before
    assert run(tokenizer, ids, stop=stop) == (ids.index(inside) + 1, "stop", stop, before + token[0])
    got = run(tokenizer, ids, stop=stop, include_stop_str_in_output=True)
    assert got[3] == before + token[:-1]


def test_the_stop_string_that_is_complete_first_wins_and_of_these_the_first_in_the_list(tokenizer):
    ids = tokenizer.encode("the")
    assert len(ids) == 1
    assert run(tokenizer, ids, stop=["e", "he", "h"])[2:] == ("h", "t")
    assert run(tokenizer, ids, stop=["e", "he"])[2:] == ("e", "th")
    assert run(tokenizer, ids, stop=["he", "e"])[2:] == ("he", "t")


def test_a_stop_string_in_the_last_token_wins_over_length(tokenizer):
    ids = tokenizer.encode("the cat sat")
    assert run(tokenizer, ids, max_tokens=len(ids), stop=["at"])[1:3] == ("stop", "at")


def test_text_before_a_stop_string_is_held_back_while_it_may_yet_begin(tokenizer):
    checker = StopChecker(SamplingParams(stop=["STOP"], max_tokens=50), (), tokenizer, 100)
    for token_id in tokenizer.encode("on the mat"):
        checker.append(token_id)
    assert checker.text == "on the "


def test_max_tokens_and_the_room_that_the_model_leaves_end_by_length(tokenizer, corpus):
    ids = tokenizer.encode(corpus)
    for params, room, expected in [({"max_tokens": 7}, 1000, 7), ({"max_tokens": None}, 9, 9), ({}, 5, 5)]:
        fed, reason, stop, text = run(tokenizer, ids, room=room, **params)
        assert (fed, reason, stop) == (expected, "length", None)
        assert text == tokenizer.decode(ids[:expected])


def test_the_models_room_counts_even_before_min_tokens(tokenizer, corpus):
    assert run(tokenizer, tokenizer.encode(corpus), room=4, min_tokens=10)[:2] == (4, "length")


def test_nothing_stops_before_min_tokens(tokenizer):
    ids = tokenizer.encode("the cat the cat the<eos>")
    fed, _, _, text = run(tokenizer, ids, stop=["cat"], min_tokens=3)
    assert fed > 3
    assert text.count("cat") == 1  # the first one came too early
    eos = tokenizer.eos_token_id
    assert run(tokenizer, [eos, eos, eos, eos], min_tokens=3)[0] == 3


@pytest.mark.parametrize("params", [{"detokenize": False}, {}])
def test_without_detokenisation_or_tokenizer_there_is_no_text(tokenizer, params):
    ids = [1, 2, 3]
    used = tokenizer if params else None
    checker = StopChecker(SamplingParams(max_tokens=3, stop_token_ids=[2], **params), (), used, 100)
    assert [checker.append(i) for i in ids[:2]] == [None, "stop"]
    assert (checker.text, checker.stop_reason) == ("", 2)


def test_the_text_goes_on_where_the_prompt_ends(metaspace_tokenizer):
    the, cat = metaspace_tokenizer.encode("the"), metaspace_tokenizer.encode("cat")
    assert run(metaspace_tokenizer, cat, prompt=the, eos=())[3] == " cat"
    assert run(metaspace_tokenizer, cat, eos=())[3] == "cat"


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10**6),
    stops=st.lists(st.sampled_from(["e", "at", "京", " STOP", "ß", "the c", "�"]), max_size=3),
)
def test_the_text_does_not_depend_on_when_it_is_read_nor_on_stops_that_never_come(tokenizer, corpus, seed, stops):
    rng = random.Random(seed)
    ids = rng.choices(tokenizer.encode(corpus), k=30)  # shuffled: half characters, too
    plain = run(tokenizer, ids)[3]
    eager = IncrementalDetokenizer(tokenizer, SamplingParams())
    assert "".join([eager.append(i) for i in ids]) == plain
    assert run(tokenizer, ids, max_tokens=30, stop=["never so"])[3] == plain
    _, reason, stop, text = run(tokenizer, ids, max_tokens=30, stop=stops)
    if not any(s in plain for s in stops):
        assert (reason, text) == ("length", plain)
    else:
        assert reason == "stop"
        assert plain.startswith(text + stop)
        assert not any(s in text for s in stops)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_tokens_that_come_together_end_a_sequence_where_single_ones_would(data):
    few = st.integers(0, 9)
    params = SamplingParams(
        max_tokens=data.draw(st.integers(1, 12)),
        stop_token_ids=data.draw(st.lists(few, max_size=3)),
        min_tokens=data.draw(st.integers(0, 1)),
        ignore_eos=data.draw(st.booleans()),
    )
    runs = data.draw(st.lists(st.lists(few, min_size=1, max_size=5), max_size=5))
    ends = []
    for together in (True, False):
        sequence = Sequence("0", [1], params, 0, None, 0)
        sequence.stop_checker = StopChecker(params, (7,), None, 20)
        for token_ids in runs if together else [[token_id] for run in runs for token_id in run]:
            num_left = 0 if sequence.has_ended else len(token_ids)
            assert sequence.emit(token_ids, None) <= num_left
        assert sequence.token_ids == [1, *sequence.output_token_ids]
        ends.append((sequence.output_token_ids, sequence.finish_reason, sequence.stop_reason))
    assert ends[0] == ends[1]
