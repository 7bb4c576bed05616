"""Synthetic pairs: cost and shapes aside, what they promise is how often draft and target agree."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from specpaged import LLM, SamplingParams
from specpaged.testing import SHAPES, synthetic_pair
from specpaged.testing.synthetic import _scaled, successors

SCALE = 32


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    directory = tmp_path_factory.mktemp("synthetic")
    return synthetic_pair(
        "Qwen3-8B", "Qwen3-0.6B", directory=directory, acceptance=0.7, scale=SCALE, dtype="float32", seed=1
    )


def generate(pair, params: SamplingParams, k: int | None) -> tuple[LLM, list[list[int]]]:
    llm = LLM(
        pair.target,
        speculative_config={"model": pair.draft, "num_speculative_tokens": k} if k else None,
        max_model_len=256,
        max_num_seqs=16,
    )
    generator = torch.Generator().manual_seed(0)
    vocab_size = llm.engine.vocabulary.size
    prompts = [
        {"prompt_token_ids": torch.randint(vocab_size, (10 + i,), generator=generator).tolist()} for i in range(16)
    ]
    return llm, [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_are_accepted_at_the_rate_asked_for(pair, temperature):
    """Of a draft's first token that rate; of each later one, given the one before."""
    params = SamplingParams(temperature=temperature, max_tokens=120, ignore_eos=True, seed=3)
    llm, speculative = generate(pair, params, 1)
    assert llm.metrics.acceptance_rate == pytest.approx(0.7, abs=0.04)
    assert speculative == generate(pair, params, None)[1]
    assert all(len(set(token_ids)) == 120 for token_ids in speculative)  # no output repeats


def test_the_target_is_one_cycle_and_the_draft_agrees_on_the_share():
    successor, proposed = successors(1000, [0.8], torch.Generator().manual_seed(5))
    seen, token = set(), 0
    while token not in seen:
        seen.add(token)
        token = int(successor[token])
    assert len(seen) == 1000
    assert sorted(proposed.tolist()) == list(range(1000))
    assert int((successor == proposed).sum()) == 800


@pytest.mark.parametrize(("acceptance", "agreeing"), [(0.0, 0), (1.0, 50)])
def test_never_and_always_are_rates_too(acceptance, agreeing):
    successor, proposed = successors(50, [acceptance], torch.Generator().manual_seed(5))
    assert int((successor == proposed).sum()) == agreeing


def walk(successor, token, num_tokens):
    tokens = []
    for _ in range(num_tokens):
        tokens.append(token)
        token = int(successor[token])
    return tokens


def test_regions_have_rates_and_cycles_of_their_own():
    successor, proposed = successors(1000, [0.9, 0.2], torch.Generator().manual_seed(5))
    agrees = successor == proposed
    assert [int(agrees[:500].sum()), int(agrees[500:].sum())] == [450, 100]
    assert sorted(walk(successor, 3, 500)) == list(range(500))
    assert sorted(walk(successor, 700, 500)) == list(range(500, 1000))
    assert sorted(proposed.tolist()) == list(range(1000))


def test_or_take_turns_in_one_cycle():
    successor, proposed = successors(1000, [0.9, 0.2], torch.Generator().manual_seed(5), turns_after=50)
    tokens = walk(successor, 0, 1000)
    assert sorted(tokens) == list(range(1000))
    is_first = [token < 500 for token in tokens]
    changes = [i for i in range(1, 1000) if is_first[i] != is_first[i - 1]]
    assert all(after - before == 50 for before, after in itertools.pairwise(changes))
    assert int((successor == proposed)[:500].sum()) == 450


def test_whatever_is_made_of_it_says_synthetic(pair):
    llm = LLM(pair.target, speculative_config={"model": pair.draft}, max_model_len=64)
    assert str(llm.report).count("(synthetic: the shape of Qwen3-") == 2
    assert json.loads((Path(pair.target) / "config.json").read_text())["synthetic"].startswith("synthetic: ")


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_configurations_and_can_be_scaled(name):
    """Parameters of the models as published, in billions, output layers counted once where theirs are tied."""
    config = AutoConfig.for_model(**SHAPES[name])
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    layer = 2 * hidden * dim * (heads + kv_heads) + 3 * hidden * inner
    billions = (config.num_hidden_layers * layer + config.vocab_size * hidden) / 1e9
    tied = {"Qwen3-0.6B": 0.60, "Qwen3-1.7B": 1.72, "Qwen3-4B": 4.02, "Llama-3.2-1B": 1.24}
    untied = {"Qwen3-8B": 8.19, "Qwen3-14B": 14.77, "Llama-3.1-8B": 8.03}
    if name in untied:
        billions += config.vocab_size * hidden / 1e9
    assert billions == pytest.approx((tied | untied)[name], abs=0.006)
    scaled = _scaled(SHAPES[name], SCALE)
    assert scaled["num_attention_heads"] % scaled["num_key_value_heads"] == 0
    assert scaled["hidden_size"] < SHAPES[name]["hidden_size"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": "GPT-4"}, "target='GPT-4' is unknown; allowed: Qwen3-0.6B, "),
        ({"draft": "qwen3"}, "draft='qwen3' is unknown; allowed: "),
        ({"draft": "Llama-3.2-1B"}, "draft='Llama-3.2-1B' has another vocabulary than target='Qwen3-8B'"),
        ({"acceptance": 1.2}, "acceptance=1.2 must be a number from 0 to 1"),
        ({"acceptance": []}, "acceptance=[] must be a number from 0 to 1, or several"),
        ({"acceptance": (0.5, -1)}, "acceptance=(0.5, -1) must be a number from 0 to 1, or several"),
        ({"turns_after": 9}, "turns_after=9 must be an int >= 1, beside several acceptances"),
        ({"acceptance": (0.5, 1), "turns_after": 0}, "turns_after=0 must be an int >= 1"),
        ({"acceptance": "0.8"}, "acceptance='0.8' must be a number from 0 to 1"),
        ({"scale": 0}, "scale=0 must be an int from 1 to 64"),
        ({"scale": 2.0}, "scale=2.0 must be an int from 1 to 64"),
        ({"dtype": "int8"}, "dtype='int8' is unknown; allowed: float32"),
    ],
)
def test_what_cannot_be_made_is_refused_before_any_work(arguments, message, tmp_path):
    with pytest.raises(ValueError) as raised:
        synthetic_pair(**({"target": "Qwen3-8B", "draft": "Qwen3-0.6B", "directory": tmp_path} | arguments))
    assert message in str(raised.value)
    assert not list(tmp_path.iterdir())
