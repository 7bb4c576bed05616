"""The study of a memory budget, on toys: what it asks of engines, and what it shows."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import budget
from benchmarks.adaptive import pairs
from benchmarks.adaptive.pairs import Pair
from tests import toys


@pytest.fixture
def pair(tokenizer_pair, monkeypatch):
    """A toy whose sequences have up to 64 tokens, by whatever name."""
    prompts = [prompt["prompt_token_ids"] for prompt in toys.prompts(6, longest=20)]
    pair = Pair("toys", tokenizer_pair.target, {"model": tokenizer_pair.draft}, prompts)
    monkeypatch.setattr(pairs, "make_pair", lambda name, directory, count: pair)
    monkeypatch.setattr(budget, "MAX_MODEL_LEN", 64)
    return pair


def test_every_way_decodes_the_same_and_is_shown(pair, tmp_path):
    app = typer.Typer(add_completion=False)
    app.command()(budget.main)
    out = tmp_path / "budget.json"
    arguments = "--turns 2 --batch-size 2 --num-prompts 3 --max-tokens 9 --rounds 1 --k 2 --rows 16 --little 3 --out"
    result = CliRunner().invoke(app, [*arguments.split(), str(out)])
    assert result.exit_code == 0, result.output
    saved = json.loads(out.read_text())
    assert saved == json.loads(result.stdout.splitlines()[-1])
    assert saved["identical"]
    assert saved["largest_batch"] == {"planned": 5, "measured": 5}
    ways = saved["ways"]
    assert list(ways) == list(budget.ways_of(1, 1))
    assert ways[budget.WIDE]["speed_over"] == 1.0
    assert ways[budget.OF_DRAFT]["generation_bytes"] < ways[budget.WIDE]["generation_bytes"]
    assert ways["16-bit KV"]["kv_bytes"] < ways[budget.WIDE]["kv_bytes"]
    assert all(figures["acceptance"] is None for name, figures in ways.items() if "plain" in name)
    assert out.with_suffix(".png").stat().st_size > 10_000
    assert "in any memory" in result.stdout or "drafts pay from" in result.stdout


def test_a_bound_is_the_plans_for_the_speed_that_was_measured(pair):
    assert budget.bound_of(pair, 1.0) is None
    models = budget.models_of(pair)
    assert budget.bound_of(pair, 50.0) > sum(model.weight_bytes for model in models)
    assert budget.bound_of(pair, 3.0) > budget.bound_of(pair, 4.0)


def test_prompts_of_a_file_are_the_embedded_pairs(pair, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"question_id": 1, "category": "chat", "turns": ["one", "two"]}) + "\n")
    with pytest.raises(typer.BadParameter, match="is for the embedded pair"):
        budget.conversations_of(pair, path, 1, 2)
