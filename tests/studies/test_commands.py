"""`specpaged bench`, on toys: what it prints and writes, and what it refuses before anything runs."""

import csv
import json

import pytest
from typer.testing import CliRunner

import specpaged.modeling.pair
from specpaged.cli import app
from specpaged.metrics import EngineMetrics
from specpaged.studies import ablation, throughput
from specpaged.studies.equivalence import compare
from specpaged.studies.grouping import of_one_length
from specpaged.studies.method import Method
from specpaged.studies.workload import Pair, Run

METHODS = "eqspec/repad,exspec/group,exspec/group/ungrouped,truncate/uncached,batch_min,truncate"
FEW = "eqspec/repad,exspec/group,truncate"


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    texts = [
        "the quick brown fox",
        "pages and blocks of the cache: pages",
        "lazy dog",
        "speculative decoding jumps over",
    ]
    lines = [json.dumps({"question_id": i, "category": "toy", "turns": [text]}) for i, text in enumerate(texts)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def run(study, pair, prompts_file, out, *arguments):
    """The JSON of a run on toy models, which is also what it wrote."""
    models = f"{pair.target},{pair.draft}"
    result = bench(
        study, "--models", models, "--prompts", prompts_file, "--max-tokens", 9, "--num-speculative-tokens", 3,
        "--window", 3, "--out", out, *arguments,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout.splitlines()[-1])
    name = printed["study"]
    assert json.loads((out / f"{name}.json").read_text()) == printed
    with (out / f"{name}.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == len(printed["rows"])
    assert (out / f"{name}.png").stat().st_size > 5_000
    assert str(pair.target) not in json.dumps(printed)  # names, no paths
    return printed


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_equivalence_finds_every_method_equal_to_plain_decoding(tokenizer_pair, prompts_file, tmp_path, numerics):
    printed = run(
        "equivalence",
        tokenizer_pair,
        prompts_file,
        tmp_path,
        "--arms",
        METHODS,
        "--batch-sizes",
        "1,3",
        "--numerics",
        numerics,
    )
    rows = printed["rows"]
    assert [row["method"] for row in rows[:4]] == ["plain", "plain", "eqspec/repad", "eqspec/repad"]
    assert len(rows) == 14
    if numerics == "exact":
        assert {(row["identical"], row["exact"], row["partial"]) for row in rows} == {(4, 100.0, 100.0)}
    of = {(row["method"], row["B"]): row for row in rows}
    assert of["plain", 1]["acceptance"] is None
    # A draft without a cache proposes the same tokens.
    assert of["continuous/truncate/uncached", 3]["acceptance"] == of["continuous/truncate", 3]["acceptance"] > 0
    assert of["eqspec/batch_min", 3]["acceptance"] < of["continuous/truncate", 3]["acceptance"]


def test_throughput_takes_ratios_to_plain_and_to_truncate(tokenizer_pair, prompts_file, tmp_path):
    printed = run(
        "throughput", tokenizer_pair, prompts_file, tmp_path, "--arms", FEW, "--batch-sizes", "2", "--rounds", 2
    )
    of = {row["method"]: row for row in printed["rows"]}
    assert of["plain"]["over_plain"] == 1
    assert of["continuous/truncate"]["truncate_over"] == 1
    assert {row["identical"] for row in printed["rows"]} == {1.0}
    assert all(0 < row["min"] <= row["median"] <= row["max"] for row in printed["rows"])


def test_ratios_are_taken_within_a_round_and_say_how_much_faster_truncate_is():
    def runs(*speeds):
        return [Run([[7]], 1 / speed, EngineMetrics()) for speed in speeds]

    plain, repad, paged = (Method.parse(name) for name in ("plain", "repad", "eqspec/truncate"))
    of_methods = {plain: runs(10, 20, 30), repad: runs(20, 20, 90), paged: runs(40, 30, 90)}
    expected = {"over_plain": 2, "truncate_over": 1.5, "truncate_min": 1, "truncate_max": 2}
    assert throughput.ratios(of_methods, repad) == pytest.approx(expected)
    assert throughput.ratios(of_methods, plain) == {"over_plain": 1}


def test_requests_that_arrive_over_time_have_latencies(tokenizer_pair, prompts_file, tmp_path):
    printed = run(
        "throughput", tokenizer_pair, prompts_file, tmp_path, "--arms", "repad,group,truncate", "--batch-sizes", "2",
        "--rounds", 1, "--request-rates", "40,200",
    )  # fmt: skip
    assert printed["study"] == "online"
    assert [(row["method"], row["rate"]) for row in printed["rows"][::3]] == [
        ("eqspec/repad", 40),
        ("eqspec/repad", 200),
    ]
    assert all(0 < row["p50"] <= row["p90"] <= row["p99"] for row in printed["rows"])


def test_overhead_accounts_for_all_of_the_time_and_the_bytes_of_a_round(tokenizer_pair, prompts_file, tmp_path):
    printed = run(
        "overhead", tokenizer_pair, prompts_file, tmp_path, "--arms", FEW, "--batch-sizes", "1,3", "--rounds", 1
    )
    of = {(row["method"], row["B"]): row for row in printed["rows"]}
    for row in printed["rows"]:
        assert sum(row[name] for name in ("verify", "draft", "realignment", "rest")) == pytest.approx(100, abs=0.1)
        parts = sum(row[f"{name}_mib"] for name in ("rollback", "gather", "other"))
        assert row["total_mib"] == pytest.approx(parts, abs=0.001)
    assert of["continuous/truncate", 3]["total_mib"] == of["eqspec/repad", 1]["total_mib"] == 0
    assert of["eqspec/repad", 3]["rollback_mib"] > 0
    assert of["exspec/group", 3]["gather_mib"] > 0


def test_grouping_counts_rounds_of_random_and_of_equal_prompts(tokenizer_pair, prompts_file, tmp_path):
    printed = run("grouping", tokenizer_pair, prompts_file, tmp_path, "--batch-sizes", "1,2")
    assert [(row["method"], row["prompts"], row["B"]) for row in printed["rows"]] == [
        ("exspec/truncate", "random", 2),
        ("exspec/truncate", "equal", 2),
        ("exspec/truncate/sorted", "random", 2),
        ("exspec/truncate/sorted", "equal", 2),
    ]
    assert all(row["grouped"] + row["fallback"] > 0 for row in printed["rows"])


def test_ablation_compares_methods_that_differ_in_one_thing(tokenizer_pair, prompts_file, tmp_path):
    printed = run("ablation", tokenizer_pair, prompts_file, tmp_path, "--batch-sizes", "2", "--rounds", 1)
    assert [row["effect"] for row in printed["rows"]] == [effect for effect, *_ in ablation.EFFECTS]
    published, *parts = (row["median"] for row in printed["rows"][:4])
    assert published == pytest.approx(parts[0] * parts[1] * parts[2], rel=1e-2)  # of one round


def test_rollback_needs_no_model(tmp_path, monkeypatch):
    monkeypatch.setattr("specpaged.studies.rollback_round.SECONDS", 0.0)
    result = bench(
        "rollback", "--arms", "repad,group", "--batch-sizes", "1,3", "--context-lens", "33", "--kv-shape", "2,1,4",
        "--out", tmp_path,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert [row["arm"] for row in rows[:3]] == ["truncate", "repad", "group"]
    assert len(rows) == 12
    assert {row["total_mib"] for row in rows if row["arm"] == "truncate"} == {0}
    assert {path.name for path in tmp_path.iterdir()} == {"rollback.csv", "rollback.json", "rollback.png"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("throughput", "--arms", "truncate,repat"),
            "--arms: 'repat' has no rollback method 'repat'; allowed: truncate, repad",
        ),
        (
            ("equivalence", "--arms", "group", "--batch-sizes", "4,16", "--window", "8"),
            "window=8 must be at least max_num_",
        ),
        (("overhead", "--arms", "compact"), "rollback='compact' is a Triton kernel and needs a GPU"),
        (("rollback", "--arms", "compact"), "--arms: 'compact' cannot run here"),
        (("rollback", "--arms", "repat"), "--arms: 'repat' is not known; allowed: truncate"),
        (("rollback", "--kv-shape", "1,2"), "--kv-shape='1,2' must be L,Hkv,D"),
        (("throughput", "--batch-sizes", "4,zero"), "--batch-sizes='4,zero' holds 'zero'; allowed: positive numbers"),
        (("throughput", "--batch-sizes", ""), "--batch-sizes='' names none"),
        (("throughput", "--request-rates", "-1"), "--request-rates='-1' holds '-1'"),
        (("grouping", "--batch-sizes", "1"), "--batch-sizes=[1] has none above 1"),
        (("grouping", "--arms", "repad"), "has no method of schedule 'exspec'"),
        (("rollback", "--context-lens", "7"), "--context-lens holds 7; allowed: 8 or more"),
        (("rollback", "--device", "cuda"), "--device='cuda' is not there"),
        (("overhead", "--device", "tpu"), "--device='tpu' is not known; allowed: 'cpu' or 'cuda[:index]'"),
        (("grouping", "--models", "one"), "--models='one' must be TARGET,DRAFT"),
        (("grouping", "--numerics", "exakt"), "--numerics='exakt' is not known; allowed: 'exact', 'fast'"),
        (("grouping", "--prompts", "BAD"), "line 2 is not JSON"),
        (("grouping", "--out", "BAD/results"), "bad.jsonl/results' cannot be written; allowed: a folder"),
    ],
)
def test_a_users_mistake_ends_in_one_sentence_before_anything_runs(arguments, message, tmp_path, monkeypatch):
    def no_model(*_, **__):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(specpaged.modeling.pair, "load_model", no_model)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"turns": ["a"]}\n{"turns": \n')
    result = bench(*(argument.replace("BAD", str(bad)) for argument in arguments))
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())


def test_partial_matches_end_where_an_output_parts_from_its_reference():
    references = [[1, 2, 3, 4], [5, 6], [7]]
    assert compare(references, [[1, 2, 3, 4], [5, 9], [7]]) == {"identical": 2, "exact": 66.67, "partial": 83.33}
    assert compare(references, [[1, 2], [5, 6, 7], [8]]) == {"identical": 0, "exact": 0.0, "partial": 38.89}


def test_arrivals_come_at_their_rate_and_are_the_same_every_time():
    arrivals = throughput.poisson_arrivals(4000, rate=5.0)
    assert arrivals == sorted(arrivals) == throughput.poisson_arrivals(4000, rate=5.0)
    assert arrivals[-1] == pytest.approx(800, rel=0.05)


def test_percentiles_are_those_of_all_latencies():
    assert throughput.percentiles([float(x) for x in range(101)]) == {"p50": 50, "p90": 90, "p99": 99}
    assert throughput.percentiles([3.0]) == {"p50": 3, "p90": 3, "p99": 3}


def test_prompts_of_one_length_are_the_longer_half_cut_to_the_median():
    assert of_one_length([[1] * 5, [2] * 2, [3] * 4, [4] * 9]) == [[1] * 4, [3] * 4, [4] * 4]


def test_a_pair_is_named_without_its_folders():
    assert Pair.parse("some/where/big,else/small").name == "big + small"
    assert Pair.parse("embedded").name == "embedded"
