"""The shipped pair is complete, small, consistent and finite."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig

import specpaged
from specpaged.training.corpus import HELD_OUT_RULE
from specpaged.training.export import load_exported

ASSETS = Path(next(iter(specpaged.__path__))) / "assets"


@pytest.fixture(scope="module")
def pair():
    return {name: load_exported(ASSETS / name) for name in ("target", "draft")}


@pytest.fixture(scope="module")
def tokenizers():
    return {name: AutoTokenizer.from_pretrained(ASSETS / name) for name in ("target", "draft")}


def test_assets_fit_twenty_megabytes():
    assert sum(path.stat().st_size for path in ASSETS.rglob("*") if path.is_file()) <= 20e6


def test_weights_are_finite_fp16(pair):
    for name, model in pair.items():
        assert json.loads((ASSETS / name / "config.json").read_text())["dtype"] == "float16"
        for p in model.parameters():
            assert p.isfinite().all()
            assert torch.equal(p, p.half().float())  # nothing was lost in the file
    assert sum(p.numel() for p in pair["draft"].parameters()) < 1e6


def test_pair_shares_one_tokenizer_and_eos(pair, tokenizers):
    target, draft = tokenizers["target"], tokenizers["draft"]
    assert target.get_vocab() == draft.get_vocab()
    assert (ASSETS / "target/tokenizer.json").read_bytes() == (ASSETS / "draft/tokenizer.json").read_bytes()
    for name, model in pair.items():
        assert model.config.vocab_size == len(target)
        assert GenerationConfig.from_pretrained(ASSETS / name).eos_token_id == target.eos_token_id == 0
    text = "def f(x):\n    return 'é' + x\n"
    assert target.decode(target(text)["input_ids"]) == text


def test_models_have_learnt_and_agree(pair, tokenizers):
    """On held-out text: the sample prompts."""
    records = [json.loads(line) for line in (ASSETS / "sample_prompts.jsonl").read_text().splitlines()]
    losses = dict.fromkeys(pair, 0.0)
    for record in records[:16]:
        ids = torch.tensor([tokenizers["target"](record["turns"][0])["input_ids"]])
        with torch.no_grad():
            for name, model in pair.items():
                losses[name] += model(input_ids=ids, labels=ids).loss.item() / 16
    assert losses["target"] + 0.1 < losses["draft"] < 2.5  # chance is 5.6


def test_prompts_are_spec_bench_records_of_the_stated_length(tokenizers):
    records = [json.loads(line) for line in (ASSETS / "sample_prompts.jsonl").read_text().splitlines()]
    assert [record["question_id"] for record in records] == list(range(64))
    for record in records:
        assert set(record) == {"question_id", "category", "turns"}
        (prompt,) = record["turns"]
        assert 50 <= len(tokenizers["target"](prompt)["input_ids"]) <= 200
        assert not prompt.endswith("\n")
    assert len({record["turns"][0] for record in records}) == 64


def test_is_held_out_is_named_in_the_card():
    assert HELD_OUT_RULE in " ".join((ASSETS / "MODEL_CARD.md").read_text().split())
