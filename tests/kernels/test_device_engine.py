"""Rounds that the device runs by itself, with the host one round late, in Triton's interpreter."""

import pytest

from specpaged import LLM, SamplingParams
from tests import toys
from tests.kernels import references

GREEDY = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, seed=3, max_tokens=6, ignore_eos=True)


def make(pair: toys.Pair, k: int = 2, device_round: bool = True, **arguments) -> LLM:
    defaults = {"max_model_len": 64, "max_num_seqs": 3, "max_num_batched_tokens": 32, "attention_backend": "triton"}
    return LLM(
        pair.target,
        speculative_config={"model": pair.draft, "num_speculative_tokens": k} if k else None,
        device_round=device_round,
        **(defaults | arguments),
    )


def token_ids(llm: LLM, prompts, params) -> list[list[list[int]]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.engine.check_integrity()
    assert llm.engine.allocator.num_held == 0
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def plain(toy_pair):
    return LLM(toy_pair.target, attention_backend="torch", max_model_len=64)


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("k", [0, 2])
def test_outputs_are_those_of_plain_decoding(toy_pair, plain, k, synchronous, monkeypatch):
    references.put_in_place(monkeypatch)
    prompts, params = toys.prompts(3, seed=5, longest=24), [GREEDY, SAMPLED, GREEDY]
    llm = make(toy_pair, k, synchronous=synchronous)
    assert token_ids(llm, prompts, params) == token_ids(plain, prompts, params)
    assert llm.metrics.steps > sum(llm.engine.host_steps.values())
    assert not k or 0 < llm.metrics.accepted_tokens < llm.metrics.draft_tokens
