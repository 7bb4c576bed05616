"""A tokenizer that raises for one request: it ends with an error, its mates do not notice, and nothing is held."""

from __future__ import annotations

import pytest

from specpaged import SamplingParams
from specpaged.engine.detokenizer import IncrementalDetokenizer
from tests import toys
from tests.engine.test_engine import GREEDY, generate, make_llm, token_ids

VICTIM = 2


class Failing:
    """A detokenizer that reads a few tokens, and raises at the next one."""

    def __init__(self, detokenizer, num_tokens):
        self.detokenizer, self.num_tokens = detokenizer, num_tokens

    def append(self, token_id):
        self.num_tokens -= 1
        if self.num_tokens < 0:
            raise KeyError("a token that nobody knows")
        return self.detokenizer.append(token_id)


@pytest.mark.parametrize("stop", [[], ["never"]], ids=["read at the end", "read token by token"])
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
@pytest.mark.parametrize("k", [0, 4])
def test_whose_text_cannot_be_read_ends_alone(tokenizer_pair, monkeypatch, k, num_tokens, stop):
    prompts, params = toys.prompts(5), SamplingParams(max_tokens=20, stop=stop, **GREEDY)
    expected = token_ids(generate(make_llm(tokenizer_pair, k=0), prompts, params))
    llm = make_llm(tokenizer_pair, k=k, draft=tokenizer_pair.target, speculative={"numerics": "exact"} if k else {})
    add, victims = llm.engine.add_request, []

    def adding(request_id, prompt_token_ids, *others):
        add(request_id, prompt_token_ids, *others)
        (sequence,) = llm.engine.requests[request_id].sequences
        if sequence.prompt_token_ids == prompts[VICTIM]["prompt_token_ids"] and not victims:
            victims.append(sequence)
            own = IncrementalDetokenizer(llm.tokenizer, params, sequence.prompt_token_ids)
            sequence.stop_checker._detokenizer = Failing(own, num_tokens)

    monkeypatch.setattr(llm.engine, "add_request", adding)
    outputs = generate(llm, prompts, params)
    failed = outputs.pop(VICTIM)
    assert "a token that nobody knows" in failed.error
    (completion,) = failed.outputs
    assert completion.token_ids == expected.pop(VICTIM)[0][: len(completion.token_ids)]
    assert len(completion.token_ids) >= num_tokens
    assert token_ids(outputs) == expected
    if k:
        assert llm.metrics.acceptance_rate == 1.0
    assert token_ids(generate(llm, prompts, params))[VICTIM][0][: len(completion.token_ids)] == completion.token_ids


def test_a_request_alone_whose_text_cannot_be_read_raises_and_the_next_one_runs(tokenizer_pair, monkeypatch):
    llm, params = make_llm(tokenizer_pair), SamplingParams(max_tokens=8, stop=["never"], **GREEDY)
    (prompt,) = toys.prompts(1)
    expected = token_ids(generate(llm, prompt, params))
    with monkeypatch.context() as patched:
        patched.setattr("specpaged.engine.detokenizer.IncrementalDetokenizer.append", lambda *_: 1 // 0)
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            generate(llm, prompt, params)
    assert token_ids(generate(llm, prompt, params)) == expected
