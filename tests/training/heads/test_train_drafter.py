"""The command on a toy target: from a file of text to heads, once more to go on, and what it refuses."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from specpaged.cli import app, printing
from specpaged.training.heads.head_checkpoint import load_heads
from specpaged.training.heads.trainer import Trainer
from tests import toys
from tests.toys import VOCAB_SIZE

BUDGET = ("--steps", 3, "--continuations", 16, "--sequence-length", 48, "--batch-size", 4, "--threads", 1)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("pages and blocks of the cache; the quick brown fox jumps over the lazy dog. " * 12)
    return path


@pytest.fixture
def train(tokenizer_pair, monkeypatch):
    monkeypatch.setattr(printing.console, "width", 200)

    def run(*arguments, target=tokenizer_pair.target):
        result = CliRunner().invoke(app, ["train-drafter", "--target", target, *map(str, arguments)])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    return run


@pytest.mark.parametrize("method", ["eagle3", "clover"])
def test_a_file_of_text_becomes_heads(train, text, tmp_path, method):
    pytest.importorskip("matplotlib")
    out = tmp_path / "heads"
    arguments = ("--method", method, "--data", text, "--out", out, *BUDGET)
    result = train(*arguments, "--json")
    assert result.exit_code == 0, result.output
    line = f'speculative_config={{"method": "{method}", "model": "{out}"}}'
    assert line in result.stdout
    figures = json.loads((out / "final.json").read_text())
    assert figures["steps"] == 3
    assert len(figures["heads"]["by_position"]) == len(figures["prompt_lookup"]["by_position"]) == 5
    assert figures["early"]["heads"] == figures["heads"]  # of continuations that are as short as that
    assert json.loads(result.stdout.splitlines()[-1])["heads"] == figures["heads"]
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert line in (out / "README.md").read_text()
    assert sorted(path.name for path in out.glob("*.safetensors")) == ["model.safetensors"]  # all that a server sees
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    assert config["hidden_size"] == 32
    if method == "eagle3":
        assert config["architectures"] == ["LlamaForCausalLMEagle3"]
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 1]
        assert tensors["d2t"].dtype == torch.int64
        assert tensors["t2d"].shape == (VOCAB_SIZE,)
        assert tensors["midlayer.self_attn.q_proj.weight"].shape == (64, 64)
    else:
        assert config["architectures"] == ["CloverForCausalLM"]
        assert config["num_heads"] == 5
        assert tensors["clover_head_mlp2.weight"].shape == (32, 64)
    load_heads(out)
    assert set(figures["speed"]) == {"1", "8"}
    for of_size in figures["speed"].values():
        assert of_size["turns"] >= 1
        assert len(of_size["over_plain"]) == 5
        assert min(of_size["over_plain"]) > 0
        assert f"{of_size['plain_tokens_per_second']:.0f}" in (out / "README.md").read_text()
    before = (out / "model.safetensors").stat().st_mtime_ns
    again = train(*arguments)
    assert again.exit_code == 0, again.output
    assert line in again.stdout
    assert (out / "model.safetensors").stat().st_mtime_ns == before


def test_a_draft_vocabulary_can_be_smaller(train, text, tmp_path):
    out = tmp_path / "heads"
    result = train("--method", "eagle3", "--data", text, "--out", out, "--draft-vocab-size", 20, *BUDGET)
    assert result.exit_code == 0, result.output
    tensors = load_file(out / "model.safetensors")
    assert tensors["lm_head.weight"].shape[0] == len(tensors["d2t"]) == int(tensors["t2d"].sum()) == 20


def refusals(tmp_path, text):
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").write_text("")
    short = tmp_path / "short.txt"
    short.write_text("too little")
    good = {"--method": "eagle3", "--data": text, "--out": tmp_path / "out"}
    return [
        (good | {"--method": "medusa"}, "--method='medusa'"),
        (good | {"--data": tmp_path / "absent"}, "--data="),
        (good | {"--data": short}, "--data="),
        (good | {"--out": other}, "--out="),
        (good | {"--target": tmp_path / "absent"}, "--target="),
        (good | {"--target": other}, "--target="),
        (good | {"--minutes": 1, "--steps": 1}, "--minutes=1"),
        (good | {"--minutes": 0}, "--minutes=0"),
        (good | {"--steps": 0}, "--steps=0"),
        (good | {"--learning-rate": -1}, "--learning-rate=-1"),
        (good | {"--sequence-length": 100_000}, "--sequence-length=100000"),
        (good | {"--method": "clover", "--draft-vocab-size": 10}, "--draft-vocab-size=10"),
    ]


def test_what_cannot_be_is_refused_in_one_sentence_before_any_work(train, text, tmp_path):
    for options, message in refusals(tmp_path, text):
        result = train(*(part for option in options.items() for part in option))
        assert result.exit_code == 2, (options, result.output)
        lines = result.stderr.strip().splitlines()
        assert len(lines) == 1, lines
        assert message in lines[0]
        assert not (tmp_path / "out").exists()


def test_a_target_that_is_not_flat_is_refused_by_name(train, text, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=30)).save_pretrained(tmp_path / "gpt2")
    result = train("--method", "clover", "--data", text, "--out", tmp_path / "out", target=str(tmp_path / "gpt2"))
    assert result.exit_code == 2
    assert "--target=" in result.stderr
    assert "gpt2" in result.stderr


def test_a_target_whose_width_its_heads_do_not_divide_is_refused_before_any_work(train, text, tmp_path):
    """Heads of its shape could be trained, and not be loaded."""
    path = tmp_path / "odd"
    toys.model(hidden_size=36, num_attention_heads=8, num_key_value_heads=2, head_dim=16).save_pretrained(path)
    for method in ("clover", "eagle3"):
        result = train("--method", method, "--data", text, "--out", tmp_path / "out", target=str(path))
        assert result.exit_code == 2
        assert "a hidden size of 36, which its 8 heads do not divide" in " ".join(result.stderr.split())
        assert not (tmp_path / "out").exists()


def test_a_folder_goes_on_with_the_same_arguments_only(train, text, tmp_path):
    arguments = ("--method", "clover", "--data", text, "--out", tmp_path / "out", *BUDGET)
    assert train(*arguments).exit_code == 0
    result = train(*arguments, "--seed", 1)
    assert result.exit_code == 2
    assert "whose --seed was 0, now 1" in result.stderr
    text.write_text(text.read_text() + "more")
    result = train(*arguments)
    assert result.exit_code == 2
    assert "whose --data was another content" in result.stderr


def test_a_run_that_was_stopped_goes_on_to_the_same_heads(train, text, tmp_path, monkeypatch):
    def arguments(out):
        return ("--method", "eagle3", "--data", text, "--out", tmp_path / out, *BUDGET)

    assert train(*arguments("whole")).exit_code == 0
    monkeypatch.setattr("specpaged.training.heads.run.SAVE_SECONDS", 0.0)
    step = Trainer._step

    def stopped(trainer, *args):
        if trainer.position["step"] == 2:
            raise KeyboardInterrupt
        return step(trainer, *args)

    monkeypatch.setattr(Trainer, "_step", stopped)
    result = train(*arguments("cut"))
    assert result.exit_code == 130
    assert "the same command goes on" in result.stdout
    monkeypatch.setattr(Trainer, "_step", step)
    assert train(*arguments("cut")).exit_code == 0
    whole, cut = (load_file(tmp_path / out / "model.safetensors") for out in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
