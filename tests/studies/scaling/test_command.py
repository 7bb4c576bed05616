"""`specpaged bench scaling` on toys: from prompts to laws, stopped and gone on with, and what it refuses."""

import json

import pytest
from typer.testing import CliRunner

import specpaged.modeling.pair
from specpaged.cli import app
from specpaged.training.scaling.run import TrainingRun
from tests import toys

TRAINING = "--sizes 32,64,96,32x2 --checkpoints 300,600,1200 --continuations 24 --sequence-length 48 --batch-size 4"
MEASURING = "--max-tokens 12 --batch-sizes 1,2 --num-speculative-tokens 3 --rounds 1 --round-seconds 1e-6 --clock cpu"
TRAINING, MEASURING = TRAINING.split(), MEASURING.split()


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    texts = [
        "the quick brown fox",
        "pages and blocks of the cache: pages",
        "lazy dog",
        "speculative decoding jumps over",
    ]
    path.write_text("".join(json.dumps({"turns": [text + " and the lazy dog of the cache"]}) + "\n" for text in texts))
    return str(path)


def scaling(*arguments):
    return CliRunner().invoke(app, ["bench", "scaling", *map(str, arguments)])


@pytest.fixture(scope="module")
def study(tokenizer_pair, prompts_file, tmp_path_factory):
    """The folders of a whole study, and what it printed."""
    pytest.importorskip("matplotlib")
    work, out = tmp_path_factory.mktemp("work"), tmp_path_factory.mktemp("out")
    arguments = ("--model", tokenizer_pair.target, "--prompts", prompts_file, "--work", work, "--out", out, *TRAINING)
    stopped = scaling(*arguments, *MEASURING, "--minutes", 1e-9, "--stages", "train")
    assert stopped.exit_code == 3, stopped.output
    result = scaling(*arguments, *MEASURING)
    assert result.exit_code == 0, result.output
    return work, out, result, arguments


def test_a_study_ends_in_tables_a_picture_and_json(study, tokenizer_pair):
    work, out, result, _ = study
    printed = json.loads(result.stdout.splitlines()[-1])
    assert json.loads((out / "scaling.json").read_text()) == printed
    assert (out / "scaling.png").stat().st_size > 20_000
    assert {path.name for path in out.iterdir()} == {"scaling.csv", "scaling.json", "scaling.png"}
    assert len(printed["rows"]) == 12
    assert {row["role"] for row in printed["rows"]} == {"fit", "size", "training", "both"}
    assert {row["size"] for row in printed["rows"] if row["role"] == "both"} == {"32x2"}
    notes = printed["notes"]
    last = max(row["tokens"] for row in printed["rows"])
    assert {law["law"] for law in notes["laws"]} > {"training, 64", f"size, {last} tokens", "both"}
    assert [best["B"] for best in notes["optima"]] == [1, 2]
    assert {row["identical"] for row in notes["sweep"]} == {1}  # of one round: drafts decide no token
    # What a batch accepts is what one sequence accepts.
    assert len({row["tokens_per_round"] for row in notes["batch"]}) == 1
    for text in (str(work), tokenizer_pair.target):
        assert text not in json.dumps(printed)  # names, no paths
    for title in ("log-linear laws", "held out", "speed over plain decoding"):
        assert title in result.output


def test_a_study_that_is_there_is_not_made_again(study, monkeypatch):
    _, _, result, arguments = study
    monkeypatch.setattr(TrainingRun, "_train", None)
    monkeypatch.setattr("specpaged.studies.scaling.study.count", None)
    again = scaling(*arguments, *MEASURING, "--stages", "train,acceptance,fit")
    assert again.exit_code == 0, again.output
    first, second = (json.loads(run.stdout.splitlines()[-1]) for run in (result, again))
    assert second["rows"] == first["rows"]
    assert second["notes"]["laws"] == first["notes"]["laws"]


def test_drafts_of_ones_own_have_a_law_of_size(study, prompts_file, tokenizer_pair, tmp_path):
    work = study[0]
    drafts = []
    for size in ("32", "64", "96"):
        folder = tmp_path / f"draft-{size}"
        folder.symlink_to(work / "drafts" / size / "1200")
        drafts.append(str(folder))
    result = scaling(
        "--model", tokenizer_pair.target, "--prompts", prompts_file, "--work", tmp_path / "own", "--drafts",
        ",".join(drafts), *MEASURING, "--stages", "acceptance,fit",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout.splitlines()[-1])
    trained = json.loads((study[1] / "scaling.json").read_text())
    assert [law["law"] for law in printed["notes"]["laws"]] == ["size"]
    assert len(printed["rows"]) == 3
    assert len(trained["notes"]["counts"][0]["rounds"][0]) * 2 == len(printed["notes"]["counts"][0]["rounds"][0])


def test_another_recipe_is_not_mixed_with_what_is_there(study):
    result = scaling(*study[3], *MEASURING, "--seed", 7)
    assert result.exit_code == 2
    assert "holds drafts whose --seed was 0, not 7; allowed: the same one, or an empty folder" in flat(result)


def flat(result):
    return " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--stages", "train,speeed"), "--stages='speeed' is not known; allowed: 'train', 'acceptance'"),
        (("--sizes", "32,64"), "--sizes='32,64' names 2; allowed: 3 sizes or more"),
        (("--sizes", "32,64,100"), "--sizes: '100' has width 100; allowed: multiples of 32"),
        (("--sizes", "32,big,64"), "--sizes: 'big' is no size; allowed: WIDTH or WIDTHxLAYERS"),
        (("--checkpoints", "200,100"), "--checkpoints='200,100' must ascend"),
        (("--checkpoints", "many"), "--checkpoints='many' holds 'many'"),
        (("--drafts", "NOWHERE"), "no directory; allowed: checkpoints of draft models"),
        (("--drafts", "DRAFT,DRAFT,OTHER"), "--drafts names drafts of 1 size; allowed: 3 sizes or more"),
        (("--drafts", "SMALL,DRAFT"), "has 200 embedding rows for the target's 300; allowed: drafts of the target's"),
        (("--hold-out", "48"), "--hold-out='48' is none of the sizes; allowed: 32, 64, 96"),
        (("--sizes", "32,64,96", "--hold-out", "96"), "--hold-out='96' leaves 2 sizes; allowed: 3 or more"),
        (("--batch-sizes", "0"), "--batch-sizes='0' holds '0'"),
        (("--num-speculative-tokens", 9), "--num-speculative-tokens=9 must be at most 8"),
        (("--max-tokens", 512), "--max-tokens=512 must be below the target's 512 positions"),
        (("--num-prompts", 2), "--prompts holds 2 prompts; allowed: 4 or more"),
        (("--model", "NOWHERE"), "is no directory"),
        (("--clock", "sun"), "--clock='sun' is not known; allowed: 'wall', 'cpu'"),
        (("--clock", "cpu", "--threads", 2), "--clock='cpu' adds up the time of --threads=2; allowed: 'wall'"),
        (("--minutes", -1), "--minutes=-1 must be more than 0"),
        (("--out", "BAD/results"), "cannot be written; allowed: a folder"),
        (("--work", "BAD/study"), "cannot be written; allowed: a folder"),
        (("--stages", "fit"), "has no draft of size 32 after 65536 tokens; allowed: train before them"),
    ],
)
def test_a_users_mistake_ends_in_one_sentence_before_anything_runs(
    arguments, message, tokenizer_pair, prompts_file, tmp_path, monkeypatch
):
    def no_model(*_, **__):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(specpaged.modeling.pair, "load_model", no_model)
    monkeypatch.setattr("specpaged.training.heads.target.load_model", no_model)
    names = {"DRAFT": tokenizer_pair.draft, "OTHER": tokenizer_pair.target, "NOWHERE": str(tmp_path / "nowhere")}
    names |= {"SMALL": str(tmp_path / "small"), "BAD": str(tmp_path / "bad.jsonl")}
    toys.model(vocab_size=200).save_pretrained(tmp_path / "small")
    (tmp_path / "bad.jsonl").write_text("x")
    defaults = {"--model": tokenizer_pair.target, "--prompts": prompts_file, "--work": str(tmp_path / "work")}
    for name, text in names.items():
        arguments = tuple(str(argument).replace(name, text) for argument in arguments)
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    result = scaling(*(part for pair in (defaults | given).items() for part in pair))
    assert result.exit_code == 2, result.output
    assert message in flat(result)


def test_drafts_whose_tokens_mean_something_else_are_refused(tokenizer_pair, prompts_file, tmp_path):
    drafts = []
    for width in (32, 48, 64):
        toys.model(hidden_size=width).save_pretrained(tmp_path / str(width))
        drafts.append(str(tmp_path / str(width)))
    tokenizer = toys.byte_tokenizer()
    tokenizer.add_tokens(["<another>"])
    tokenizer.save_pretrained(drafts[1])
    result = scaling(
        "--model", tokenizer_pair.target, "--prompts", prompts_file, "--work", tmp_path / "work", "--drafts",
        ",".join(drafts),
    )  # fmt: skip
    assert result.exit_code == 2
    assert "has another vocabulary than the target, of 301 and 300 tokens; allowed: drafts of the target's" in flat(
        result
    )


def test_two_drafts_of_one_name_are_told_apart_or_refused(tokenizer_pair, prompts_file, tmp_path):
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "draft").symlink_to(tokenizer_pair.draft)
    drafts = f"{tmp_path}/a/draft,{tmp_path}/b/draft"
    result = scaling(
        "--model", tokenizer_pair.target, "--prompts", prompts_file, "--work", tmp_path, "--drafts", drafts
    )
    assert result.exit_code == 2
    assert "are both 'draft'; allowed: names that differ" in flat(result)
