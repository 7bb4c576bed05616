"""The dense reference of heads, on weights whose drafts are known: tokens have near-orthogonal embeddings, and behind
token v comes f(v), one cycle through a few tokens.
"""

import pytest
import torch
from safetensors.torch import load_file, save_file

from specpaged.testing.heads import write_clover, write_eagle3
from tests import toys
from tests.drafting.heads_reference import clover_reference, eagle3_reference, residual_streams

WIDTH, VOCAB_SIZE = 256, 40
CYCLE = [4, 10, 32, 2, 18, 26, 8]  # the tokens that are drafted
KNOWN = [11, 4, 33, 18, 10]
FLAGS = {
    "none": {"norm_before_residual": False},
    "all": {"norm_before_residual": True, "norm_before_fc": True, "fc_norm": True, "norm_output": True},
    "its own default is the other's setting": {},
    "draft vocabulary": {"norm_before_residual": True, "draft_vocab_size": 20, "own_embedding": False},
}


def behind(token_id: int, count: int) -> list[int]:
    """f(v), f(f(v)), ..."""
    start = CYCLE.index(token_id)
    return [CYCLE[(start + i) % len(CYCLE)] for i in range(1, count + 1)]


@pytest.fixture(scope="module")
def target():
    """Its layer adds nothing, so that all hidden states are embeddings; behind CYCLE's tokens, its output is f."""
    model = toys.model(
        vocab_size=VOCAB_SIZE, hidden_size=WIDTH, num_hidden_layers=1, tie_word_embeddings=False, eos_token_id=None
    )
    generator = torch.Generator().manual_seed(3)
    signs = torch.randint(0, 2, (VOCAB_SIZE, WIDTH), generator=generator) * 2.0 - 1
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(signs)
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        model.lm_head.weight[[behind(v, 1)[0] for v in CYCLE]] = signs[CYCLE]
    return model


def rewritten(path, change) -> None:
    """`change` the weights of a checkpoint, whose norms do nothing."""
    weights = load_file(path / "model.safetensors")
    norms = {name: torch.ones_like(tensor) for name, tensor in weights.items() if "norm" in name}
    changed = weights | norms | change(weights)
    save_file({name: tensor.clone() for name, tensor in changed.items()}, path / "model.safetensors")


def zeros(weights, *ends) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in weights.items() if name.endswith(ends)}


def write_worked_eagle3(path, target, spelling, change) -> None:
    """One head as wide as the layer; a tap at the embeddings. CYCLE's tokens and some others may be drafted."""
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": WIDTH}
    write_eagle3(path, target.config, spelling=spelling, aux_layers=(0,), norm_before_residual=False, norm_output=True,
                 own_embedding=False, draft_vocab_size=20, favoured_token_ids=CYCLE, **heads)  # fmt: skip

    def all_changed(weights):
        draft_to_target = weights["d2t"] + torch.arange(20)
        output = target.lm_head.weight.detach()[draft_to_target]
        return {"lm_head.weight": output} | zeros(weights, "o_proj.weight", "down_proj.weight") | change(weights)

    rewritten(path, all_changed)


@pytest.mark.parametrize("spelling", ["authors", "speculators"])
def test_eagle3_reads_the_features_of_the_last_token_that_the_target_has_run(target, tmp_path, spelling):
    """A layer that adds nothing drafts from these alone, again and again: the newest token has none yet."""
    write_worked_eagle3(tmp_path, target, spelling, lambda weights: {"fc.weight": torch.eye(WIDTH)})
    drafts = eagle3_reference(tmp_path, target, KNOWN, 3)
    assert drafts.token_ids == behind(18, 1) * 3
    assert min(drafts.margins) > 1


@pytest.mark.parametrize("spelling", ["authors", "speculators"])
def test_eagle3_pairs_them_with_the_newest_token_and_each_draft_with_the_one_before(target, tmp_path, spelling):
    """Attention looks for a row's own token and takes it, ten times as large as the features."""

    def change(weights):
        layer = "midlayer" if spelling == "authors" else "layers.0"
        own = torch.cat([torch.eye(WIDTH), torch.zeros(WIDTH, WIDTH)], 1)  # of embedding and features
        names = {f"{layer}.self_attn.{name}_proj.weight": own for name in "qkv"}
        return names | {f"{layer}.self_attn.o_proj.weight": 10 * torch.eye(WIDTH), "fc.weight": torch.eye(WIDTH)}

    write_worked_eagle3(tmp_path, target, spelling, change)
    drafts = eagle3_reference(tmp_path, target, KNOWN, 5)
    assert drafts.token_ids == behind(10, 5)
    assert min(drafts.margins) > 1


def write_worked_clover(path, target, value: float) -> None:
    """Cosines are 1, as queries and keys are the same vector; `value` times the token's embedding is added."""
    write_clover(path, target.config, num_heads=3)

    def change(weights):
        changed = zeros(weights, "o_proj.weight", "down_proj.weight", ".bias")
        for rnn in ("clover_head_mlp_rnn", "clover_head_mlp_rnn2"):
            changed |= zeros(weights, f"{rnn}.q.weight", f"{rnn}.k.weight")
            changed |= {f"{rnn}.{name}.bias": torch.ones(WIDTH) for name in "qk"}
            changed[f"{rnn}.v.weight"] = value * torch.eye(WIDTH)
        changed["clover_head_mlp.weight"] = torch.eye(WIDTH)
        return changed | {"clover_head_mlp2.weight": torch.cat([torch.eye(WIDTH), torch.zeros(WIDTH, WIDTH)], 1)}

    rewritten(path, change)


def test_clover_reads_the_last_token_that_the_target_has_run(target, tmp_path):
    write_worked_clover(tmp_path, target, 0)
    assert clover_reference(tmp_path, target, KNOWN, 3).token_ids == behind(18, 1) * 3


def test_clover_attends_to_the_newest_token_and_then_to_each_draft(target, tmp_path):
    write_worked_clover(tmp_path, target, 10)
    drafts = clover_reference(tmp_path, target, KNOWN, 3)
    assert drafts.token_ids == behind(10, 3)
    assert min(drafts.margins) > 1


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_both_spellings_mean_the_same(tmp_path, flags):
    target = toys.model(num_hidden_layers=7)
    (prompt,) = toys.prompts(1, seed=5, shortest=20)
    drafts = {}
    for spelling, default in (("authors", False), ("speculators", True)):
        # What one spelling leaves to its default, the other one says.
        said = {"norm_before_residual": True} if not flags and not default else {}
        write_eagle3(tmp_path / spelling, target.config, spelling=spelling, **(flags | said))
        drafts[spelling] = eagle3_reference(tmp_path / spelling, target, prompt["prompt_token_ids"], 5)
    authors, speculators = drafts.values()
    assert authors.token_ids == speculators.token_ids
    assert authors.runners_up == speculators.runners_up
    assert authors.margins == pytest.approx(speculators.margins, abs=1e-4)


def test_every_setting_changes_what_is_drafted(tmp_path):
    target = toys.model(num_hidden_layers=7)
    (prompt,) = toys.prompts(1, seed=5, shortest=20)
    settings = [
        {}, {"norm_before_residual": True}, {"norm_before_fc": True}, {"fc_norm": True}, {"norm_output": True},
        {"own_embedding": False}, {"aux_layers": (2, 3, 5)}, {"rope_theta": 500.0}, {"draft_vocab_size": 60},
    ]  # fmt: skip
    seen = set()
    for i, setting in enumerate(settings):
        write_eagle3(tmp_path / str(i), target.config, **setting)
        drafts = eagle3_reference(tmp_path / str(i), target, prompt["prompt_token_ids"], 5)
        seen.add((*drafts.token_ids, *(round(margin, 2) for margin in drafts.margins)))
    assert len(seen) == len(settings)


def test_the_last_stream_is_what_the_final_norm_reads():
    target = toys.model(num_hidden_layers=3)
    (prompt,) = toys.prompts(1)
    token_ids = prompt["prompt_token_ids"]
    streams = residual_streams(target, token_ids)
    with torch.no_grad():
        output = target(torch.tensor([token_ids]), output_hidden_states=True)
        assert len(streams) == 4
        assert torch.equal(streams[0], target.get_input_embeddings().weight[token_ids])
        assert torch.equal(target.model.norm(streams[-1]), output.hidden_states[-1][0])
