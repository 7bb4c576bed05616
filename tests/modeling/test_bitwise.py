"""Under numerics="exact" the logits of a position have the same bits however they come about."""

import pytest
import torch

from specpaged.modeling.flat import config as flat_families
from specpaged.modeling.loading import load_model
from tests.modeling.families import FAMILIES, save_toy, toy_config
from tests.modeling.world import World, random_tokens

DECODERS = [(name, "transformers") for name in FAMILIES]
DECODERS += [(name, "flat") for name in FAMILIES if toy_config(name).model_type in flat_families.FAMILIES]
PROMPT, TOTAL = 56, 70  # tokens; the logits of positions PROMPT .. TOTAL-1 are compared: keys are summed 64 at a time


def one_token_decode(model, tokens: list[int], block_size: int) -> torch.Tensor:
    """B = 1: a prefill, then a token per pass. The reference of all others."""
    world = World(model, block_size, seed=1)
    world.run(("a", tokens[:PROMPT], 0))
    return torch.cat([world.run(("a", tokens[i : i + 1], 1))["a"] for i in range(PROMPT, len(tokens))])


def verify_beside_mates(model, tokens: list[int], block_size: int, drafts: int) -> torch.Tensor:
    """B = 8: passes of drafts + 1 rows, each after a rejected run that is rolled back; mates of other lengths in other
    phases: prefill, decode and verify."""
    world = World(model, block_size, seed=2)
    mates = [f"m{i}" for i in range(7)]
    for i, mate in enumerate(mates):
        world.run((mate, random_tokens(9 + 23 * i, 100 + i), 0))
    world.run(("a", tokens[: PROMPT - 7], 0), (mates[0], random_tokens(11, 5), 1))
    world.run((mates[1], random_tokens(3, 6), 3), ("a", tokens[PROMPT - 7 : PROMPT], 0))
    out, position = [], PROMPT
    while position < len(tokens):
        stop = min(position + drafts + 1, len(tokens))
        wrong = [tokens[position], *random_tokens(stop - position - 1, position)]
        world.run(("a", wrong, len(wrong)), (mates[2], [7], 1))
        world.truncate("a", position)
        rows = [(m, random_tokens(1 + (position + i) % (drafts + 1), position + i), 1) for i, m in enumerate(mates)]
        rows.insert(position % 8, ("a", tokens[position:stop], stop - position))
        out.append(world.run(*rows)["a"])
        position = stop
    return torch.cat(out)


def chunked_prefill(model, tokens: list[int], block_size: int, chunks: tuple[int, ...]) -> torch.Tensor:
    """Ragged prefill in chunks beside another prefill."""
    world = World(model, block_size, seed=3)
    out, position, step = [], 0, 0
    while position < len(tokens):
        stop = min(position + chunks[step % len(chunks)], len(tokens))
        rows = [("m", random_tokens(5 + 9 * step, 50 + step), 2), ("a", tokens[position:stop], stop - position)]
        out.append(world.run(*rows[:: 1 - 2 * (step % 2)])["a"])
        position, step = stop, step + 1
    return torch.cat(out)[PROMPT:]


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.isfinite(expected).all()
    assert torch.equal(got, expected), f"{int((got != expected).any(dim=1).sum())} of {len(expected)} rows differ"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["torch", "cpp"])
@pytest.mark.parametrize(("name", "model_impl"), DECODERS)
def test_rows_have_the_same_bits_in_decode_verify_and_prefill(name, model_impl, backend, dtype, toy_model):
    model = toy_model(name, dtype=dtype, model_impl=model_impl, attention_backend=backend)
    tokens = random_tokens(TOTAL, 4)
    expected = one_token_decode(model, tokens, 16)
    assert_same_bits(verify_beside_mates(model, tokens, 16, drafts=5), expected)
    assert_same_bits(chunked_prefill(model, tokens, 16, (13, 1, 30)), expected)


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "float16", "fp8_e4m3"])
@pytest.mark.parametrize("backend", ["torch", "cpp"])
@pytest.mark.parametrize(("name", "model_impl"), [("qwen3", "flat"), ("gemma2", "flat"), ("gpt_oss", "transformers")])
def test_rows_have_the_same_bits_where_kv_is_narrower(name, model_impl, backend, kv_cache_dtype, toy_model):
    model = toy_model(
        name, dtype="float32", kv_cache_dtype=kv_cache_dtype, model_impl=model_impl, attention_backend=backend
    )
    tokens = random_tokens(TOTAL, 4)
    expected = one_token_decode(model, tokens, 16)
    assert_same_bits(verify_beside_mates(model, tokens, 16, drafts=5), expected)
    assert_same_bits(chunked_prefill(model, tokens, 16, (13, 1, 30)), expected)
    wide = toy_model(name, dtype="float32", model_impl=model_impl, attention_backend=backend)
    as_wide = one_token_decode(wide, tokens, 16)
    assert not torch.equal(as_wide, expected)
    apart = (as_wide - expected).norm(dim=1) / as_wide.norm(dim=1)
    most = 0.3 if kv_cache_dtype == "fp8_e4m3" else 0.05
    assert apart.median() < most  # not of all rows: a router may pick another expert


@pytest.mark.parametrize("backend", ["torch", "cpp"])
@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_rows_have_the_same_bits_under_every_block_size(name, block_size, backend, toy_model):
    model = toy_model(name, dtype="float32", attention_backend=backend)
    tokens = random_tokens(TOTAL, 4)
    expected = one_token_decode(model, tokens, 4)
    assert_same_bits(verify_beside_mates(model, tokens, block_size, drafts=7), expected)
    assert_same_bits(chunked_prefill(model, tokens, block_size, (TOTAL,)), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["torch", "cpp"])
@pytest.mark.parametrize("name", ["qwen3", "mistral", "gpt_oss"])
def test_long_contexts_have_the_same_bits(name, backend, dtype, toy_model):
    """Across the edges of KV buckets, and prefills of more rows than one attention call takes."""
    model = toy_model(name, dtype=dtype, attention_backend=backend)
    tokens = random_tokens(620, 8)
    world = World(model, 16, poison=False)
    whole = world.run(("a", tokens, len(tokens)))["a"]
    for start in (60, 126, 190, 380, 509, 600):
        world = World(model, 64, seed=start, poison=False)
        world.run(("m", tokens[:33], 0), ("a", tokens[:start], 0))
        decoded = [world.run(("a", tokens[i : i + 1], 1))["a"] for i in range(start, start + 4)]
        assert_same_bits(torch.cat(decoded), whole[start : start + 4])
        world.truncate("a", start)
        verified = world.run(("m", tokens[33:35], 1), ("a", tokens[start : start + 8], 8))["a"]
        assert_same_bits(verified, whole[start : start + 8])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_large_layers_have_the_same_bits(backend, dtype, tmp_path):
    """Large enough that prepacked weights come first, with inner sizes that leave element-wise tails."""
    path = save_toy(
        "llama", tmp_path, hidden_size=768, intermediate_size=1100, num_attention_heads=6, num_key_value_heads=2
    )
    model = load_model(path, dtype=dtype, attention_backend=backend)
    assert "2200x768" in model.numerics_scheme
    tokens = random_tokens(TOTAL, 4)
    expected = one_token_decode(model, tokens, 16)
    assert_same_bits(verify_beside_mates(model, tokens, 16, drafts=5), expected)
    assert_same_bits(chunked_prefill(model, tokens, 16, (13, 1, 30)), expected)


def test_inner_sizes_with_tails_pad_the_pass_further(tmp_path):
    model = load_model(save_toy("qwen3", tmp_path, intermediate_size=99), attention_backend="torch")
    assert model.row_multiple == 32
    tokens = random_tokens(TOTAL, 4)
    expected = one_token_decode(model, tokens, 16)
    assert_same_bits(verify_beside_mates(model, tokens, 16, drafts=5), expected)


def test_fast_numerics_really_differ(toy_model):
    """The tests above can fail: without exact numerics they would."""
    model = toy_model("qwen3", numerics="fast", attention_backend="torch")
    tokens = random_tokens(TOTAL, 4)
    expected = one_token_decode(model, tokens, 16)
    assert not torch.equal(verify_beside_mates(model, tokens, 16, drafts=5), expected)
