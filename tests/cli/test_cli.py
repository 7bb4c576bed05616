"""The command line: what it prints, writes and returns, on a toy pair."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from shutil import copytree

import pytest
from typer.testing import CliRunner

from specpaged.cli import app, printing
from specpaged.config import EngineConfig
from specpaged.engine.engine import Engine
from specpaged.modeling.model_runner import ModelRunner
from specpaged.paging.page_table import PageTable
from specpaged.speculative_config import METHODS
from specpaged.verification.coupled import CoupledVerifier

FLAGS = [
    "--model",
    "--draft-model",
    "--method",
    "--drafter",
    "--speculative-config",
    "--prompts",
    "--num-prompts",
    "--max-prompt-tokens",
    "--num-speculative-tokens",
    "--max-num-seqs",
    "--max-tokens",
    "--temperature",
    "--seed",
    "--dtype",
    "--numerics",
    "--output",
    "--json",
]
TEXTS = [
    "the quick brown fox jumps over",
    "lazy dog",
    "pages and blocks of",
    "cache",
    "speculative deco",
    "over the lazy",
]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"question_id": f"q{i}", "category": "toy", "turns": [text]}) for i, text in enumerate(TEXTS)]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def specpaged(tokenizer_pair, monkeypatch):
    """Run a command on the toy pair, in a wide terminal."""
    monkeypatch.setattr(printing.console, "width", 200)
    monkeypatch.setenv("TERMINAL_WIDTH", "200")

    def run(command, *arguments, pair=tokenizer_pair, stdin=None):
        models = ["--model", pair.target, "--draft-model", pair.draft] if pair else []
        result = CliRunner().invoke(app, [command, *models, *map(str, arguments)], input=stdin)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    return run


SHORT = ("--max-tokens", 10)
DRAFTING = ("--num-speculative-tokens", 3)


@pytest.mark.parametrize("command", ["generate", "verify"])
def test_help_lists_the_flags(specpaged, command):
    result = specpaged(command, "--help", pair=None)
    assert result.exit_code == 0
    shown = set(re.findall(r"--[a-z][a-z-]*", re.sub(r"\x1b\[[0-9;]*m", "", result.stdout)))
    assert shown >= {*FLAGS, *(["--reference"] if command == "verify" else [])}


def test_generate_prints_a_table_and_every_completion(specpaged, prompts, tmp_path):
    output = tmp_path / "completions.jsonl"
    result = specpaged("generate", "--prompts", prompts, "--output", output, *SHORT, *DRAFTING)
    assert result.exit_code == 0
    for column in ("tokens/s", "rounds", "acceptance", "mean acceptance length", "rollback"):
        assert column in result.stdout
    assert "prompts 6, " in result.stdout
    assert ", 0 clipped" in result.stdout
    assert all(f"q{i} " in result.stdout for i in range(6))
    assert "numerics exact" in result.stdout
    entries = [json.loads(line) for line in output.read_text().splitlines()]
    assert [entry["question_id"] for entry in entries] == [f"q{i}" for i in range(6)]
    assert [entry["prompt"] for entry in entries] == TEXTS
    for entry in entries:
        assert entry["category"] == "toy"
        assert isinstance(entry["text"], str)
        assert 0 < len(entry["token_ids"]) <= 10
        assert entry["finish_reason"] in ("length", "stop")
        assert isinstance(entry["seed"], int)
        assert 0 <= entry["acceptance_rate"] <= 1


def test_generate_writes_what_plain_decoding_writes(specpaged, prompts, tmp_path):
    def token_ids(*arguments):
        output = tmp_path / "completions.jsonl"
        result = specpaged("generate", "--prompts", prompts, "--output", output, *SHORT, *arguments)
        assert result.exit_code == 0
        return [json.loads(line)["token_ids"] for line in output.read_text().splitlines()]

    sampled = token_ids("--temperature", 0.8, "--seed", 5)
    assert token_ids("--temperature", 0.8, "--seed", 5, "--num-speculative-tokens", 0) == sampled
    assert token_ids("--temperature", 0.8, "--seed", 50) != sampled


def test_json_ends_in_one_line_that_parses(specpaged, prompts):
    result = specpaged("generate", "--prompts", prompts, "--json", *SHORT, *DRAFTING)
    last = json.loads(result.stdout.splitlines()[-1])
    assert last["tokens_per_second"] > 0
    assert last["emitted_tokens"] > 0
    assert 0 <= last["acceptance_rate"] <= 1
    assert {"specpaged", "torch", "transformers", "python", "threads", "rollbacks", "steps"} <= set(last)
    result = specpaged("verify", "--prompts", prompts, "--json", *SHORT)
    last = json.loads(result.stdout.splitlines()[-1])
    assert (last["prompts"], last["identical"], last["faults"], last["near_ties"]) == (6, 6, 0, 0)


def test_num_prompts_takes_an_even_spread(specpaged, prompts, tmp_path):
    output = tmp_path / "completions.jsonl"
    specpaged("generate", "--prompts", prompts, "--num-prompts", 3, "--output", output, *SHORT)
    assert [json.loads(line)["question_id"] for line in output.read_text().splitlines()] == ["q0", "q2", "q4"]


def test_long_prompts_are_clipped_and_counted(specpaged, tmp_path):
    prompts = tmp_path / "long.jsonl"
    prompts.write_text("\n".join(json.dumps({"turns": [text]}) for text in ("fox", "dog " * 20, "the fox " * 400)))
    result = specpaged("generate", "--prompts", prompts, "--max-prompt-tokens", 6, *SHORT)
    assert re.search(r"prompts 3, \d-6 tokens \(median 6\), 2 clipped", result.stdout)
    # By default, what max_model_len = 512 leaves beside --max-tokens.
    result = specpaged("generate", "--prompts", prompts, *SHORT)
    assert re.search(r"prompts 3, \d-502 tokens .*, 1 clipped", result.stdout)


def test_a_dash_reads_prompts_from_standard_input(specpaged):
    stdin = "".join(json.dumps({"question_id": f"in{i}", "turns": [text]}) + "\n" for i, text in enumerate(TEXTS[:2]))
    result = specpaged("generate", "--prompts", "-", *SHORT, stdin=stdin)
    assert result.exit_code == 0
    assert "in0" in result.stdout
    assert "in1" in result.stdout


def completions(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_prompts_given_as_arguments_are_completed_as_those_of_a_file(specpaged, prompts, tmp_path):
    output = tmp_path / "completions.jsonl"
    assert specpaged("generate", "--prompts", prompts, "--output", output, *SHORT).exit_code == 0
    of_file = completions(output)
    result = specpaged("generate", *TEXTS, "--json", "--output", output, *SHORT)
    assert result.exit_code == 0
    of_arguments = completions(output)
    assert [(entry["question_id"], entry["category"]) for entry in of_arguments] == [(i, "") for i in range(1, 7)]
    for name in ("prompt", "token_ids", "text"):
        assert [entry[name] for entry in of_arguments] == [entry[name] for entry in of_file]
    last = json.loads(result.stdout.splitlines()[-1])
    assert last["emitted_tokens"] == sum(len(entry["token_ids"]) for entry in of_arguments)


def test_num_prompts_selects_among_arguments_too(specpaged, tmp_path):
    output = tmp_path / "completions.jsonl"
    assert specpaged("generate", *TEXTS, "--num-prompts", 2, "--output", output, *SHORT).exit_code == 0
    assert [entry["question_id"] for entry in completions(output)] == [1, 4]


def test_without_any_prompt_the_sample_prompts_are_completed(specpaged, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr("specpaged.prompts.SAMPLE_PROMPTS", prompts)
    output = tmp_path / "completions.jsonl"
    assert specpaged("generate", "--output", output, *SHORT).exit_code == 0
    assert [entry["question_id"] for entry in completions(output)] == [f"q{i}" for i in range(6)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["a prompt", "--prompts", "file.jsonl"],
            "prompts are given both as arguments, PROMPT, and by --prompts='file.jsonl'; allowed: one of the two",
        ),
        (["a prompt", ""], "PROMPT='' is empty or not UTF-8; allowed: text of at least one character"),
        (["a \udcff"], "PROMPT='a \\udcff' is empty or not UTF-8; allowed: text of at least one character"),
    ],
)
def test_bad_prompts_as_arguments_are_refused_in_one_sentence(specpaged, monkeypatch, arguments, message):
    monkeypatch.setattr("specpaged.comparison.job.LLM", None)  # nothing is loaded
    result = specpaged("generate", *arguments)
    assert (result.exit_code, result.stderr) == (2, f"error: {message}\n")


def test_an_invariant_that_breaks_is_no_fault_of_the_users(tokenizer_pair, monkeypatch):
    """Whatever is refused is a ValueError, and ends in one sentence. Within a step one has other reasons."""

    def broken(_table, _pool, _num_tokens):
        raise ValueError("num_tokens must be in 0..3, the capacity left, got 4")

    monkeypatch.setattr(PageTable, "advance", broken)
    models = ["--model", tokenizer_pair.target, "--draft-model", tokenizer_pair.draft]
    result = CliRunner().invoke(app, ["generate", "a prompt", *models])
    assert result.exit_code == 1
    assert isinstance(result.exception, RuntimeError)
    assert "a step failed twice: ValueError: num_tokens must be" in str(result.exception)


REPETITIVE = [" fox" * 12, " the dog" * 9, " cache and" * 8]


@pytest.mark.parametrize("k", [None, 3])
def test_prompt_lookup_drafts_for_any_target_and_changes_no_output(specpaged, tokenizer_pair, tmp_path, k):
    output = tmp_path / "completions.jsonl"
    target = ("--model", tokenizer_pair.target, "--max-tokens", 40, "--output", output, "--json")
    lookup = ("--method", "ngram", *(() if k is None else ("--num-speculative-tokens", k)))
    result = specpaged("generate", *REPETITIVE, *target, *lookup, pair=None)
    assert result.exit_code == 0
    assert "no --draft-model" not in result.stdout
    assert "by prompt lookup of 5 to 5 tokens" in result.stdout
    accepted = json.loads(result.stdout.splitlines()[-1])["accepted_tokens"]
    assert accepted > 0 or k is None  # the default decides by what passes take here
    drafted = [entry["token_ids"] for entry in completions(output)]
    plain = specpaged("generate", *REPETITIVE, *target, pair=None)
    assert "no --draft-model: decoding plainly" in plain.stdout
    assert [entry["token_ids"] for entry in completions(output)] == drafted


def test_several_methods_draft_together(specpaged, prompts):
    flags = ("--method", "suffix,draft_model", "--num-speculative-tokens", 4, "--prompts", prompts, *SHORT)
    result = specpaged("verify", *flags)
    assert result.exit_code == 0
    assert "; else method draft_model" in result.stdout
    assert result.stdout.splitlines()[-1] == "6/6 outputs identical"


def test_what_no_flag_says_is_said_as_vllm_spells_it(specpaged, prompts, tokenizer_pair):
    config = {"method": ["suffix", "draft_model"], "num_speculative_tokens": 3, "suffix_decoding_max_tree_depth": 17}
    result = specpaged("verify", "--speculative-config", json.dumps(config), "--prompts", prompts, *SHORT)
    assert result.exit_code == 0
    assert "K = 3" in result.stdout
    assert "17 tokens" in result.stdout
    assert "; else method draft_model" in result.stdout
    assert result.stdout.splitlines()[-1] == "6/6 outputs identical"
    ranges = {"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 4, 2]]}
    flags = ("--speculative-config", json.dumps(ranges), "--model", tokenizer_pair.target, "--prompts", prompts, *SHORT)
    result = specpaged("verify", *flags, pair=None)
    assert result.exit_code == 0
    assert "K by batch size" in result.stdout


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        ("{method: ngram}", [], "--speculative-config='{method: ngram}' is not JSON: Expecting property name"),
        ('["ngram"]', [], '--speculative-config=\'["ngram"]\' is no object; allowed: {"method": '),
        ('{"methods": "ngram"}', [], "speculative_config has no key 'methods'; allowed: model, method, "),
        ('{"method": "eagle"}', [], "speculative_config['method']='eagle' is not known; allowed: 'draft_model', "),
        ('{"method": [["ngram"]]}', [], "speculative_config['method'][0]=['ngram'] is not known; allowed: "),
        ('{"method": 5}', [], "speculative_config['method']=5 is not known; allowed: 'draft_model', "),
        (
            '{"method": "ngram"}',
            ["--method", "suffix"],
            "--method='suffix' is said by --speculative-config, too, 'method'; allowed: one of both",
        ),
        (
            '{"num_speculative_tokens": 2}',
            ["--num-speculative-tokens", 2],
            "--num-speculative-tokens=2 is said by --speculative-config, too, 'num_speculative_tokens'; allowed: one",
        ),
        (
            '{"method": "ngram"}',
            ["--draft-model", "d"],
            "--draft-model='d' is for --method draft_model, eagle3, clover; --method ngram has none",
        ),
        ('{"method": "eagle3"}', [], "--method=eagle3 needs --draft-model, heads that were trained on the target"),
        ('{"suffix_decoding_max_tree_depth": 9}', [], "speculative_config['suffix_decoding_max_tree_depth']=9 is for"),
    ],
)
def test_a_speculative_config_that_does_not_fit_is_refused(specpaged, monkeypatch, config, arguments, message):
    monkeypatch.setattr("specpaged.comparison.job.LLM", None)  # nothing is loaded
    result = specpaged("generate", "--speculative-config", config, *arguments, pair=None)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {message}")
    assert len(result.stderr.splitlines()) == 1


def test_verify_refuses_to_compare_what_is_drawn_anew(specpaged, prompts):
    flags = ("--speculative-config", '{"verification": "rejection"}', "--prompts", prompts, *SHORT)
    result = specpaged("verify", *flags, "--temperature", 0.5)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("error: --temperature=0.5 has no reference under verification=")
    assert specpaged("generate", *flags, "--temperature", 0.5).exit_code == 0


def test_verify_verifies_prompt_lookup(specpaged, prompts, tokenizer_pair):
    flags = ("--method", "ngram", "--prompts", prompts, *SHORT)
    result = specpaged("verify", "--model", tokenizer_pair.target, *flags, pair=None)
    assert result.exit_code == 0
    assert "speculative, batch of 8, K as decided in every step" in result.stdout
    assert "no --draft-model" not in result.stdout
    assert result.stdout.splitlines()[-1] == "6/6 outputs identical"


def test_verify_verifies_a_drafter_of_somebody_elses(specpaged, prompts, tokenizer_pair):
    flags = ("--model", tokenizer_pair.target, "--method", "custom", "--prompts", prompts, *SHORT, *DRAFTING)
    result = specpaged("verify", *flags, "--drafter", "tests.drafting.test_custom:Repeats", pair=None)
    assert result.exit_code == 0
    assert "K      3, by tests.drafting.test_custom:Repeats" in result.stdout
    assert result.stdout.splitlines()[-1] == "6/6 outputs identical"
    result = specpaged("verify", *flags, "--drafter", "no_such:Name", pair=None)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: speculative_config['drafter']='no_such:Name' cannot be imported")


@pytest.mark.parametrize("command", ["generate", "verify"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--method", "ngram", "--draft-model", "d"],
            "--draft-model='d' is for --method draft_model, eagle3, clover; --method ngram has none",
        ),
        (["--method", "eagle"], f"--method='eagle' is not known; allowed: {', '.join(map(repr, METHODS))}"),
        (
            ["--method", "eagle", "--model", "m"],
            f"--method='eagle' is not known; allowed: {', '.join(map(repr, METHODS))}",
        ),
        (["--drafter", "a:B"], "--drafter='a:B' is for --method custom; it is draft_model"),
        (
            ["--method", "custom", "--drafter", "a.B"],
            "--drafter='a.B' must be 'package.module:Class', or in Python a class or another callable",
        ),
    ],
)
def test_a_method_that_is_unknown_or_has_no_model_is_refused(specpaged, monkeypatch, command, arguments, message):
    monkeypatch.setattr("specpaged.comparison.job.LLM", None)  # nothing is loaded
    result = specpaged(command, *arguments, pair=None)
    assert (result.exit_code, result.stderr) == (2, f"error: {message}\n")


@pytest.mark.parametrize("method", ["draft_model", "ngram"])
def test_nobody_is_told_of_a_missing_draft_who_asked_for_plain_decoding(specpaged, prompts, tokenizer_pair, method):
    flags = ("--method", method, "--num-speculative-tokens", 0, "--prompts", prompts, *SHORT)
    result = specpaged("generate", "--model", tokenizer_pair.target, *flags, pair=None)
    assert result.exit_code == 0
    assert "no --draft-model" not in result.stdout


def test_completions_are_shown_as_they_are_written(specpaged, prompts, monkeypatch):
    """Code is full of what rich would take for markup, and some of it would be an error."""
    from specpaged.engine.stop_checker import StopChecker

    monkeypatch.setattr(StopChecker, "text", property(lambda self: "x[i] = y[/b]; [bold]z"))
    result = specpaged("generate", "--prompts", prompts, "--num-prompts", 2, *SHORT)
    assert result.exit_code == 0
    assert result.stdout.count("x[i] = y[/b]; [bold]z") == 2


@pytest.mark.parametrize("sampling", [(), ("--temperature", 0.8), ("--temperature", 0.8, "--seed", 7)])
def test_verify_ends_with_the_number_of_identical_outputs(specpaged, prompts, tmp_path, sampling):
    output = tmp_path / "completions.jsonl"
    batch = ("--max-num-seqs", 4, "--plain-batch")
    result = specpaged("verify", "--prompts", prompts, *batch, "--output", output, *SHORT, *sampling)
    assert result.exit_code == 0
    assert "plain, batch of 4" in result.stdout
    assert result.stdout.splitlines()[-1] == "6/6 outputs identical"
    assert "plain, one at a time" in result.stdout
    assert "speculative, batch of 4, K as decided in every step" in result.stdout
    assert "mismatches" not in result.stdout
    assert len(output.read_text().splitlines()) == 6


@pytest.mark.parametrize("sampling", [(), ("--temperature", 0.8, "--seed", 7)])
def test_verify_says_how_many_steps_overlapped(specpaged, prompts, sampling):
    """With a fixed K they do; in the default schedule none does."""
    arguments = ("--prompts", prompts, "--max-num-seqs", 4, "--num-speculative-tokens", 2, "--json", *SHORT, *sampling)
    for schedule, overlaps in (("overlap", True), ("continuous", False)):
        result = specpaged("verify", "--schedule", schedule, *arguments)
        assert result.exit_code == 0
        last = json.loads(result.stdout.splitlines()[-1])
        assert (last["overlapped_steps"] > 0) == overlaps
        assert (last["identical"], last["prompts"]) == (6, 6)


@pytest.mark.parametrize(
    ("num_drafts", "num_tokens", "said"),
    [
        (0, 1000, "decided not to draft"),
        (20, 1000, "90.0%, in 20 drafts alone: decided not to draft"),
        (20, 300, "90.0%"),  # 36 of the tokens are from drafts
    ],
)
def test_verify_says_what_was_decided(num_drafts, num_tokens, said):
    from specpaged.cli.verify import _acceptance
    from specpaged.metrics import EngineMetrics

    metrics = EngineMetrics(drafts=num_drafts, draft_tokens=2 * num_drafts, accepted_tokens=18 * num_drafts // 10)
    assert _acceptance(metrics, num_tokens) == said


@pytest.fixture
def planted_fault(monkeypatch):
    """The first bonus token that follows accepted drafts is another one: a fault of speculation alone."""
    verify = CoupledVerifier.verify
    planted = []

    def faulty(self, logits, draft, sampling):
        verified = verify(self, logits, draft, sampling)
        for i, num_accepted in enumerate(verified.num_accepted):
            if num_accepted and not planted:
                token_ids = [list(ids) for ids in verified.token_ids]
                token_ids[i][-1] = token_ids[i][-1] % 90 + 1
                planted.append((i, len(sampling.requests[i].output_token_ids) + num_accepted))
                return replace(verified, token_ids=token_ids)
        return verified

    monkeypatch.setattr(CoupledVerifier, "verify", faulty)
    monkeypatch.setattr(EngineConfig, "rounds_per_step", 1)  # whose tokens it does not see
    return planted


@pytest.mark.parametrize("reference", ["plain", "hf"])
def test_verify_reports_a_planted_fault_and_exits_with_1(specpaged, prompts, planted_fault, reference):
    result = specpaged("verify", "--prompts", prompts, "--reference", reference, "--num-speculative-tokens", 5, *SHORT)
    [(prompt, position)] = planted_fault
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "5/6 outputs identical"
    rows = [line for line in result.stdout.splitlines() if "fault" in line]
    assert len(rows) == 1
    cells = [cell.strip() for cell in rows[0].split("│")[1:-1]]
    assert cells[:2] == [f"q{prompt}", str(position)]
    assert bool(cells[3]) == (reference == "hf")  # the margin that the reference sees there


def test_verify_finds_logits_that_depend_on_the_batch(specpaged, prompts, monkeypatch):
    """Numerics at fault, not bookkeeping: in plain passes of more than three rows, the token beside the best wins."""
    verify = CoupledVerifier.verify

    def inexact(self, found, draft, sampling):
        if len(draft.token_ids) > 3 and not any(draft.token_ids):
            found = found._replace(token_ids=[token_id ^ 1 for token_id in found.token_ids])
        return verify(self, found, draft, sampling)

    monkeypatch.setattr(CoupledVerifier, "verify", inexact)
    result = specpaged("verify", "--prompts", prompts, "--plain-batch", "--json", *SHORT)
    assert result.exit_code == 1
    last = json.loads(result.stdout.splitlines()[-1])
    assert last["faults"] > 0
    assert last["identical"] < 6


@pytest.mark.parametrize("penalty", [None, 3.0])
def test_verify_against_transformers_finds_no_fault(specpaged, prompts, tokenizer_pair, tmp_path, penalty):
    """And asks transformers for greedy decoding, whatever its checkpoint's generation_config would rather do."""
    target = Path(copytree(tokenizer_pair.target, tmp_path / "target"))
    if penalty:
        path = target / "generation_config.json"
        config = json.loads(path.read_text()) if path.is_file() else {}
        config |= {"repetition_penalty": penalty, "do_sample": True, "temperature": 5.0, "min_new_tokens": 9}
        path.write_text(json.dumps(config | {"eos_token_id": 0}))
    pair = replace(tokenizer_pair, target=str(target))
    result = specpaged("verify", "--prompts", prompts, "--reference", "hf", "--max-tokens", 24, pair=pair)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "6/6 outputs identical"
    assert "transformers generate, one at a time" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "fp8"], "dtype='fp8' is not known; allowed: 'auto', 'float32', 'bfloat16', 'float16'"),
        (["--numerics", "sloppy"], "numerics='sloppy' is not known; allowed: 'exact', 'fast'"),
        (
            ["--prompts", "nowhere.jsonl"],
            "prompts='nowhere.jsonl' is not a file; allowed: a path to JSON lines, or '-'",
        ),
        (["--prompts", "-"], "prompts='-' line 2 has turns=None; allowed:"),
        (["--max-tokens", "512"], "--max-tokens=512 must be below max_model_len=512"),
        (["--num-speculative-tokens", "511"], "speculative_config['num_speculative_tokens']=511 must be at most"),
        (["--model", "/no/where"], "model '/no/where' does not exist"),
        (["--output", "no/such/folder/x.jsonl"], "--output='no/such/folder/x.jsonl' cannot be written; allowed: "),
    ],
)
@pytest.mark.parametrize("command", ["generate", "verify"])
def test_bad_input_is_one_sentence_on_standard_error_and_exit_status_2(
    specpaged, prompts, monkeypatch, command, arguments, message
):
    monkeypatch.setattr(printing.errors, "width", 40)  # a sentence stays on its line
    monkeypatch.setattr(Engine, "step", None)  # no work is done
    stdin = '{"turns": ["good"]}\n{"prompt": "bad"}\n'
    result = specpaged(command, "--prompts", prompts, *SHORT, *arguments, stdin=stdin)
    assert result.exit_code == 2
    lines = [line for line in result.stderr.splitlines() if not line.startswith("Loading weights")]
    assert len(lines) == 1
    assert lines[0].startswith("error: " + message)
    assert "outputs identical" not in result.stdout


def test_bad_references_exit_with_2(specpaged, prompts):
    result = specpaged("verify", "--prompts", prompts, "--reference", "vllm")
    assert (result.exit_code, result.stderr) == (2, "error: --reference='vllm' is not known; allowed: plain, hf\n")
    result = specpaged("verify", "--prompts", prompts, "--reference", "hf", "--temperature", 0.5)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --temperature=0.5 has no --reference hf")


@pytest.mark.parametrize("flag", ["--num-speculative-tokens", "--max-tokens", "--max-num-seqs", "--num-prompts"])
def test_numbers_below_their_minimum_exit_with_2(specpaged, prompts, flag):
    result = specpaged("generate", "--prompts", prompts, flag, -1)
    assert result.exit_code == 2
    assert flag in result.stderr
    assert "Invalid value" in result.stderr


def test_a_request_that_fails_among_others_is_told_and_exits_with_1(specpaged, prompts, tmp_path, monkeypatch):
    greedy = ModelRunner.greedy
    poisoned = []

    def poison(self, rows, *arguments, **options):
        found = greedy(self, rows, *arguments, **options)
        if not poisoned:
            poisoned.append(True)
            found[0].logprobs[0] = float("nan")
        return found

    monkeypatch.setattr(ModelRunner, "greedy", poison)
    output = tmp_path / "completions.jsonl"
    result = specpaged("generate", "--prompts", prompts, "--output", output, "--num-speculative-tokens", 0, *SHORT)
    assert result.exit_code == 1
    assert len(re.findall(r"^error: .*NaN", result.stderr, re.MULTILINE)) == 1
    entries = [json.loads(line) for line in output.read_text().splitlines()]
    assert [("error" in entry) for entry in entries] == [True, False, False, False, False, False]


def test_a_target_without_a_draft_decodes_plainly_and_says_so(specpaged, prompts, tokenizer_pair):
    result = specpaged("generate", "--model", tokenizer_pair.target, "--prompts", prompts, *SHORT, pair=None)
    assert result.exit_code == 0
    assert "no --draft-model: decoding plainly" in result.stdout


ROOT = next(folder for folder in Path(__file__).parents if (folder / "setup.py").is_file())


def test_the_installed_command_is_the_app():
    [target] = re.findall(r'"specpaged = (specpaged\.cli[^"]*)"', (ROOT / "setup.py").read_text())
    assert EntryPoint("specpaged", target, "console_scripts").load() is app


def test_help_waits_for_no_torch():
    code = "import sys, specpaged.cli; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_demo_runs_with_the_defaults_of_the_command_line():
    [recipe] = re.findall(r"^demo:.*\n\t\$\(BIN\)/specpaged (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe.split() == ["verify", "--plain-batch"]


@pytest.fixture
def quick_tune(monkeypatch):
    monkeypatch.setattr("specpaged.comparison.pair_profile.PROBE_SECONDS", 0.2)
    monkeypatch.setattr("specpaged.comparison.pair_profile.ROUND_SECONDS", 0.2)


@pytest.mark.parametrize("method", ["draft_model", "suffix,draft_model", "ngram,suffix"])
def test_tune_says_what_drafting_is_worth_and_ends_in_the_line_for_vllm(
    specpaged, prompts, tmp_path, quick_tune, tokenizer_pair, method
):
    arguments = ("--prompts", prompts, "--max-num-seqs", 4, "--out", tmp_path, "--json", *SHORT, "--method", method)
    if "draft_model" in method:
        result = specpaged("tune", *arguments)
    else:
        result = specpaged("tune", "--model", tokenizer_pair.target, *arguments, pair=None)
    assert result.exit_code == 0, result.stderr
    figures = json.loads(result.stdout.splitlines()[-1])
    assert list(figures["speedup"]) == ["1", "2", "4"]
    for rounds in (figures, figures["single_rounds"]):
        assert all(speeds[0] == 1.0 and len(speeds) == 9 for speeds in rounds["speedup"].values())
    assert figures["acceptance_by_category"] == {"toy": figures["acceptance_by_position"]}
    assert json.loads((tmp_path / "tune.json").read_text()).items() <= figures.items()
    if not any(figures["single_rounds"]["best"].values()):
        assert "leave --speculative-config out" in result.stdout
    elif method == "ngram,suffix":
        assert "vLLM has no words for method=['ngram', 'suffix'] without a model" in result.stdout
    else:
        assert f"--speculative-config '{json.dumps(figures['speculative_config'])}'" in result.stdout
        assert ("--additional-config" in result.stdout) == ("," in method)


@pytest.mark.parametrize("key", ["num_speculative_tokens", "max_num_speculative_tokens"])
def test_tune_measures_each_k_and_takes_none(specpaged, prompts, monkeypatch, key):
    monkeypatch.setattr("specpaged.comparison.job.LLM", None)  # nothing is loaded
    result = specpaged("tune", "--prompts", prompts, "--speculative-config", json.dumps({key: 3}))
    said = f"error: --speculative-config {key}=3 is what is measured; allowed: without it\n"
    assert (result.exit_code, result.stderr) == (2, said)


def test_there_is_nothing_to_tune_without_a_draft(tokenizer_pair, prompts):
    result = CliRunner().invoke(app, ["tune", "--model", tokenizer_pair.target, "--prompts", str(prompts)])
    assert result.exit_code == 2
    assert "nothing to tune without a draft; allowed: --draft-model" in result.stderr
