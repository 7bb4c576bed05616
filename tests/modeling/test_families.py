"""Each family, on paged KV, against transformers' own eager forward of one sequence at a time."""

from functools import cache

import pytest
import torch
import transformers

from tests.modeling.families import FAMILIES
from tests.modeling.world import World, random_tokens

# longrope: with max_model_len past the original length, every sequence has the long factors; HF gives them to sequences
# of more than 32 tokens, so all that are compared here are longer.
TOKENS = {"a": random_tokens(61, 1), "b": random_tokens(47, 2), "c": random_tokens(70, 3)}


@pytest.fixture(scope="module")
def hf_logits(toy_path):
    """hf_logits("qwen3") -> transformers' logits of each of TOKENS, computed once."""

    @cache
    def logits(name: str) -> dict[str, torch.Tensor]:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            toy_path(name), attn_implementation="eager", experts_implementation="eager"
        ).eval()
        with torch.inference_mode():
            return {
                seq: model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
                for seq, tokens in TOKENS.items()
            }

    return logits


@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("backend", ["torch", "cpp"])
@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
@pytest.mark.parametrize("name", FAMILIES)
def test_ragged_prefill_rejected_draft_and_verify_match_transformers(
    name, model_impl, backend, numerics, hf_logits, toy_model
):
    model = toy_model(name, numerics=numerics, model_impl=model_impl, attention_backend=backend)
    world = World(model, block_size=4)
    a, b, c = TOKENS.values()
    expected = hf_logits(name)

    def check(got: dict, **stops: int) -> None:
        for seq, stop in stops.items():
            rows = got[seq].shape[0]
            difference = (got[seq] - expected[seq][stop - rows : stop]).abs().max()
            assert difference < 1e-4, (seq, stop, float(difference))

    # Chunked prefill beside a whole one, then decode beside a prefill.
    world.run(("a", a[:19], 0), ("b", b[:1], 0))
    check(world.run(("a", a[19:41], 3), ("b", b[1:40], 39), ("c", c[:50], 5)), a=41, b=40, c=50)
    # A draft of three tokens of a, of which the first is right; c decodes one token, b's draft is right as a whole.
    wrong = [*a[41:43], (a[43] + 1) % 128, 5]
    got = world.run(("c", c[50:51], 1), ("a", wrong, 4), ("b", b[40:47], 7))
    check({"c": got["c"], "b": got["b"], "a": got["a"][:2]}, c=51, b=47, a=43)
    world.truncate("a", 43)
    # The rolled back positions are written again, in whatever blocks come now.
    check(world.run(("a", a[43:45], 2), ("c", c[51:57], 6)), a=45, c=57)
    check(world.run(("c", c[57:58], 1), ("a", a[45:46], 1)), c=58, a=46)
    check(world.run(("a", a[46:61], 15)), a=61)
