import copy
import dataclasses
import pickle

import pytest

from specpaged.sampling_params import SamplingParams, bad_words_token_ids, validate_for_model


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (16, 0, None, None)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert params.detokenize
    assert params.skip_special_tokens
    assert not params.ignore_eos


@pytest.mark.parametrize(
    ("given", "field", "kept"),
    [
        ({"stop": "END"}, "stop", ("END",)),
        ({"stop": ["a", "b", "a"]}, "stop", ("a", "b")),
        ({"stop_token_ids": [3, 3, 1]}, "stop_token_ids", (3, 1)),
        ({"seed": -1}, "seed", None),
        ({"top_k": -1}, "top_k", 0),
        ({"temperature": 0.001}, "temperature", 0.01),
        ({"temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1}, "top_p", 1.0),
        ({"logprobs": True}, "logprobs", 1),
        ({"logit_bias": {"5": 200, 6: -300.0, 7: 1}}, "logit_bias", {5: 100.0, 6: -100.0, 7: 1.0}),
        ({"max_tokens": None}, "max_tokens", None),
        ({"extra_args": {"num_speculative_tokens": 0}}, "num_speculative_tokens", 0),
        ({}, "num_speculative_tokens", None),
    ],
)
def test_values_are_normalised_as_in_vllm(given, field, kept):
    assert getattr(SamplingParams(**given), field) == kept


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", True),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("repetition_penalty", float("inf")),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", 2**64),
        ("seed", "7"),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logprobs", -2),
        ("prompt_logprobs", -2),
        ("stop", ""),
        ("stop", [1]),
        ("bad_words", [""]),
        ("bad_words", "word"),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", 5),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("logit_bias", {"x": 1.0}),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", [1]),
        ("ignore_eos", 1),
        ("detokenize", None),
        ("extra_args", {"num_speculative_tokens": -1}),
        ("extra_args", ["num_speculative_tokens"]),
    ],
)
def test_a_bad_value_is_refused_with_its_name(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


def test_greedy_sampling_refuses_more_than_one_output():
    with pytest.raises(ValueError, match="n=2"):
        SamplingParams(temperature=0, n=2)


def test_stop_strings_need_detokenisation():
    with pytest.raises(ValueError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


@pytest.mark.parametrize("name", ["best_of", "use_beam_search", "logits_processors", "structured_outputs", "typo"])
def test_an_unknown_parameter_is_refused_by_name(name):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: 2})


def test_an_unknown_extra_arg_is_refused_by_name():
    with pytest.raises(ValueError, match="'foo'"):
        SamplingParams(extra_args={"foo": 1})


def test_params_are_frozen_values():
    params = SamplingParams(seed=3, stop="x", logit_bias={1: 2.0})
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 4
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
    assert dataclasses.replace(params, seed=4).stop == ("x",)


def test_the_callers_containers_are_not_kept():
    extra, bias = {"num_speculative_tokens": 2}, {1: 1.0}
    params = SamplingParams(extra_args=extra, logit_bias=bias)
    extra["num_speculative_tokens"] = -5
    bias[99] = 1.0
    assert params.num_speculative_tokens == 2
    assert params.logit_bias == {1: 1.0}


@pytest.mark.parametrize("given", [{"logit_bias": {10: 1.0}}, {"allowed_token_ids": [0, 10]}, {"stop_token_ids": [11]}])
def test_token_ids_that_the_model_lacks_are_refused(given):
    params = SamplingParams(**given)
    validate_for_model(params, 12, tokenizer_present=True)
    with pytest.raises(ValueError, match=next(iter(given))):
        validate_for_model(params, 10, tokenizer_present=True)


@pytest.mark.parametrize("given", [{"stop": "x"}, {"bad_words": ["x"]}])
def test_what_needs_a_tokenizer_is_refused_without_one(given):
    validate_for_model(SamplingParams(**given), 10, tokenizer_present=True)
    with pytest.raises(ValueError, match=next(iter(given))):
        validate_for_model(SamplingParams(**given), 10, tokenizer_present=False)


class _Words:
    """A tokenizer of a few words."""

    def __init__(self):
        self.vocab = {
            "bad": [1],
            " bad": [2],
            "worse": [3, 4],
            " worse": [5, 4],
            "odd": [6],
            " odd": [7, 6],
            "same": [8],
        }

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return self.vocab.get(text, [8] if text == " same" else [])


def test_bad_words_are_tokenised_with_and_without_a_leading_space():
    def ids(words):
        return bad_words_token_ids(SamplingParams(bad_words=words), _Words())

    assert ids(["bad"]) == ((1,), (2,))
    assert ids([" bad"]) == ((1,), (2,))
    assert ids(["worse"]) == ((3, 4), (5, 4))
    assert ids(["odd"]) == ((6,),)  # another number of tokens: not the same word with a space
    assert ids(["same"]) == ((8,),)
    with pytest.raises(ValueError, match="bad_words"):
        ids(["unknown"])
    with pytest.raises(ValueError, match="bad_words"):
        bad_words_token_ids(SamplingParams(bad_words=["worse"]), _Words(), vocab_size=5)
