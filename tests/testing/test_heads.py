"""Checkpoints of heads with random weights say what they were asked for, and nothing else."""

import json

import pytest
import torch
from safetensors.torch import load_file

from specpaged.testing.heads import write_clover, write_eagle3
from tests import toys


def read(path) -> tuple[dict, dict[str, torch.Tensor]]:
    return json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")


def test_both_spellings_have_the_same_weights(tmp_path):
    for spelling in ("authors", "speculators"):
        write_eagle3(tmp_path / spelling, toys.config(), spelling=spelling, draft_vocab_size=100, seed=4)
    authors, speculators = (read(tmp_path / spelling)[1] for spelling in ("authors", "speculators"))
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in authors.items()}
    assert renamed.keys() == speculators.keys()
    assert all(torch.equal(tensor, speculators[name]) for name, tensor in renamed.items())


def test_settings_stand_where_the_spelling_has_them(tmp_path):
    settings = {"norm_before_residual": False, "norm_before_fc": True, "aux_layers": (1, 2, 4)}
    write_eagle3(tmp_path / "top", toys.config(), **settings)
    write_eagle3(tmp_path / "inner", toys.config(), in_eagle_config=True, **settings)
    write_eagle3(tmp_path / "speculators", toys.config(), spelling="speculators", **settings)
    top, inner, speculators = (read(tmp_path / name)[0] for name in ("top", "inner", "speculators"))
    nested = {"norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 4]}
    assert inner["eagle_config"] == nested
    assert top == {name: value for name, value in inner.items() if name != "eagle_config"} | nested
    assert {name: speculators[name] for name in ("norm_before_residual", *nested)} == {
        "norm_before_residual": False,
        **nested,
    }
    assert speculators["transformer_layer_config"]["hidden_size"] == toys.config().hidden_size


@pytest.mark.parametrize("option", ["norm_before_fc", "fc_norm", "own_embedding"])
def test_weights_that_a_setting_leaves_out_are_not_there_and_others_stay(tmp_path, option):
    names = {"norm_before_fc": ["input_norm.weight"], "own_embedding": ["embed_tokens.weight"]}
    optional = names.get(option, [f"fc_norm.{i}.weight" for i in range(3)])
    for value in (True, False):
        write_eagle3(tmp_path / str(value), toys.config(), **{option: value})
    present, absent = (read(tmp_path / str(value))[1] for value in (True, False))
    assert present.keys() - absent.keys() == set(optional)
    assert all(torch.equal(tensor, present[name]) for name, tensor in absent.items())


def test_a_smaller_vocabulary_has_the_favoured_tokens_and_says_which_it_has(tmp_path):
    favoured = (7, 250, 31)
    write_eagle3(tmp_path, toys.config(), draft_vocab_size=20, favoured_token_ids=favoured)
    config, weights = read(tmp_path)
    token_ids = weights["d2t"] + torch.arange(20)
    assert config["draft_vocab_size"] == len(weights["lm_head.weight"]) == 20
    assert set(favoured) <= set(token_ids.tolist())
    assert weights["t2d"].nonzero().flatten().tolist() == token_ids.tolist()
    norms = weights["lm_head.weight"].norm(dim=1)
    is_favoured = torch.isin(token_ids, torch.tensor(favoured))
    assert norms[is_favoured].min() > 2 * norms[~is_favoured].mean()


def test_a_vocabulary_that_is_the_targets_has_no_map(tmp_path):
    for draft_vocab_size in (None, toys.VOCAB_SIZE):
        write_eagle3(tmp_path, toys.config(), draft_vocab_size=draft_vocab_size)
        assert not {"d2t", "t2d"} & read(tmp_path)[1].keys()


def test_clover_has_no_embedding_and_no_output_layer(tmp_path):
    write_clover(tmp_path, toys.config(), num_heads=3)
    config, weights = read(tmp_path)
    assert (config["architectures"], config["num_heads"]) == (["CloverForCausalLM"], 3)
    assert not [name for name in weights if "embed_tokens" in name or "lm_head" in name]
    assert weights["clover_head_mlp2.weight"].shape == (32, 64)


@pytest.mark.parametrize(
    ("write", "arguments", "message"),
    [
        (write_eagle3, {"spelling": "theirs"}, "spelling='theirs'"),
        (write_eagle3, {"draft_vocab_size": 301}, "draft_vocab_size=301"),
        (write_eagle3, {"spelling": "speculators", "in_eagle_config": True}, "in_eagle_config=True"),
        (write_eagle3, {"draft_vocab_size": 2, "favoured_token_ids": (1, 2, 3)}, "favoured_token_ids="),
        (write_eagle3, {"hidden_size": 48, "own_embedding": False}, "own_embedding=False"),
        (write_clover, {"num_heads": 0}, "num_heads=0"),
        (write_clover, {"hidden_size": 48}, "hidden_size=48"),
    ],
)
def test_what_cannot_be_written_is_refused_by_name(tmp_path, write, arguments, message):
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "heads", toys.config(), **arguments)
    assert not (tmp_path / "heads").exists()
