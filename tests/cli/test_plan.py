"""`specpaged plan`: a table, one line of JSON, commands that run, and refusals in one sentence."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from specpaged.cli.main import app

runner = CliRunner()


def plan(pair, *arguments: str):
    models = ["--model", pair.target, "--draft-model", pair.draft]
    return runner.invoke(app, ["plan", *models, "--context", "256", *arguments])


@pytest.fixture
def no_costs(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECPAGED_CACHE", str(tmp_path))


def test_a_plan_ends_in_one_line_of_json_and_a_picture(toy_pair, tmp_path, no_costs):
    out = tmp_path / "plan"
    result = plan(toy_pair, "--memory", "8MiB", "--max-num-batched-tokens", "256", "--json", "--out", str(out))
    assert result.exit_code == 0, result.output
    figures = json.loads(result.output.splitlines()[-1])
    names = [way["name"] for way in figures["ways"]]
    assert names[:3] == ["plain", "plain, 16-bit KV", "draft"]
    assert all(way["bytes"] <= 8 << 20 for way in figures["ways"] if way["batch"])
    assert json.loads((out / "plan.json").read_text())["best"] == figures["best"]
    assert (out / "plan.png").stat().st_size > 1000
    assert figures["costs"].startswith("assumed: 30 GB/s")
    assert "speculation" in result.output


@pytest.mark.parametrize("kind", ["shared", "window"])
def test_the_command_for_our_engine_is_one_that_holds_the_batch(tokenizer_pair, no_costs, kind):
    arguments = ["--memory", "8MiB", "--max-num-batched-tokens", "256", "--json", "--acceptance", "0.95"]
    arguments += ["--kv-cache-dtype", "float32", "--draft-kv-cache-dtype", "float32"]
    arguments += ["--draft-kv-window", "64" if kind == "window" else "255"]
    result = plan(tokenizer_pair, *arguments)
    figures = json.loads(result.output.splitlines()[-1])
    best = next(way for way in figures["ways"] if way["name"] == figures["best"])
    words = shlex.split(figures["commands"]["engine"])
    assert words[:2] == ["specpaged", "generate"]
    assert words[words.index("--max-num-seqs") + 1] == str(best["batch"])
    ran = runner.invoke(app, [*words[1:], "--max-tokens", "4", "a", "b"])
    assert ran.exit_code == 0, ran.output
    assert f": {best['batch']} sequences of 256 tokens" in " ".join(ran.output.split())
    config = shlex.split(figures["commands"]["vllm"])
    assert config[config.index("--worker-cls") + 1] == "specpaged.vllm_plugin.worker.SpecPagedWorker"
    if "--speculative-config" in config:
        speculative = json.loads(config[config.index("--speculative-config") + 1])
        assert speculative["method"] == "draft_model"


def test_a_gpus_plan_keeps_kv_in_the_arithmetics_dtype(toy_pair, no_costs):
    """Its kernels read no other, and refuse what a command would ask for."""
    result = plan(toy_pair, "--memory", "8GiB", "--device", "cuda", "--json")
    assert result.exit_code == 0, result.output
    ways = json.loads(result.output.splitlines()[-1])["ways"]
    assert {way["kv_cache_dtype"] for way in ways} == {"float32"}
    assert {way["draft_kv_cache_dtype"] for way in ways} == {None, "float32"}
    refused = plan(toy_pair, "--memory", "8GiB", "--device", "cuda", "--draft-kv-cache-dtype", "fp8_e4m3")
    assert refused.exit_code == 2
    words = " ".join(refused.stderr.split())
    assert "--draft-kv-cache-dtype='fp8_e4m3' beside float32 is not read by the kernels of device='cuda'" in words


def test_what_does_not_fit_says_what_one_sequence_takes(toy_pair, no_costs):
    result = plan(toy_pair, "--memory", "100KB", "--json")
    assert result.exit_code == 1
    assert "nothing fits: one sequence of 256 tokens takes" in result.output
    assert json.loads(result.output.splitlines()[-1])["least_memory"] > 100_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "six"], "--memory='six' must be a number of bytes; allowed: 6GiB, 800MB, 8589934592"),
        (["--memory", "6GiB", "--context", "513"], "--context=513 must be at most the 512 positions of the target"),
        (["--memory", "6GiB", "--draft-kv-window", "8"], "--draft-kv-window=8 must be an int >= 64"),
        (["--memory", "6GiB", "--acceptance", "1.5"], "--acceptance=1.5 must be a number; allowed: 0 to 1"),
        (["--memory", "6GiB", "--kv-cache-dtype", "int8"], "--kv-cache-dtype='int8' is not known; allowed: 'auto'"),
        (["--memory", "6GiB", "--draft-model", "no/such"], "--draft-model='no/such' is no directory, nor in the hub's"),
        (["--memory", "6GiB", "--measured", "none.json"], "--measured='none.json' cannot be used (FileNotFoundError"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_sentence(toy_pair, arguments, message):
    result = plan(toy_pair, *arguments)
    assert result.exit_code == 2
    errors = result.stderr.splitlines()
    assert len(errors) == 1
    assert message in errors[0]


def test_heads_are_no_draft_model(target, heads):
    result = runner.invoke(
        app, ["plan", "--model", target[0], "--draft-model", heads["eagle3"], "--memory", "1GiB", "--context", "256"]
    )
    assert result.exit_code == 2
    assert "holds heads that read a target" in result.stderr


def test_a_plan_loads_no_weights(toy_pair):
    """It does not even import torch."""
    code = (
        "import sys\nfrom specpaged.cli.main import app\n"
        f"app(['plan', '--model', {toy_pair.target!r}, '--draft-model', {toy_pair.draft!r}, '--memory', '1GiB', "
        "'--context', '256', '--json'], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
