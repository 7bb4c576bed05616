"""Drafts of a recipe: a training that was stopped ends with the bits of one that was not."""

import pytest
import torch
from safetensors.torch import load_file

from specpaged.training.heads.target import FrozenTarget
from specpaged.training.scaling import trainer
from specpaged.training.scaling.draft_model import fresh_draft
from specpaged.training.scaling.lessons import Lesson
from specpaged.training.scaling.recipe import Recipe
from specpaged.training.scaling.run import POSITION, TrainingRun
from specpaged.training.scaling.shape import DraftShape
from specpaged.training.scaling.trainer import Batch, DraftTrainer
from tests import toys

PROMPTS = [prompt["prompt_token_ids"] for prompt in toys.prompts(5, shortest=8)]
SHAPES = (DraftShape(32), DraftShape(64))


def recipe_of(target, checkpoints=(200, 600), **values):
    arguments = {"continuations": 10, "sequence_length": 48, "batch_size": 3} | values
    return Recipe(target, None, SHAPES, checkpoints, **arguments)


def train(recipe, work, seconds=float("inf")):
    recipe.claim(work)
    return TrainingRun(recipe, work, PROMPTS).run(lambda label, total: lambda count: None, seconds)


@pytest.fixture(scope="module")
def whole(tokenizer_pair, tmp_path_factory):
    work = tmp_path_factory.mktemp("whole")
    assert train(recipe_of(tokenizer_pair.target), work)
    return work


def tensors_of(work, shape, tokens):
    return load_file(work / "drafts" / shape.name / str(tokens) / "model.safetensors")


def test_stopped_after_every_step_it_ends_with_the_same_bits(whole, tokenizer_pair, tmp_path):
    recipe, stops = recipe_of(tokenizer_pair.target), 0
    while not train(recipe, tmp_path, seconds=0.0):
        stops += 1
        assert stops < 100
    assert stops > 8  # the lessons, and a step at a time
    for shape in SHAPES:
        for tokens in recipe.checkpoints:
            expected, resumed = tensors_of(whole, shape, tokens), tensors_of(tmp_path, shape, tokens)
            assert expected.keys() == resumed.keys()
            assert all(torch.equal(tensor, resumed[name]) for name, tensor in expected.items())
            assert (whole / "drafts" / shape.name / str(tokens) / POSITION).read_text() == (
                tmp_path / "drafts" / shape.name / str(tokens) / POSITION
            ).read_text()


def test_a_draft_does_not_depend_on_the_checkpoints_kept_before_it(whole, tokenizer_pair, tmp_path):
    assert train(recipe_of(tokenizer_pair.target, checkpoints=(600,)), tmp_path)
    expected, found = (tensors_of(work, SHAPES[0], 600) for work in (whole, tmp_path))
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    with pytest.raises(ValueError, match=r"--checkpoints names 200, and training 32 is past that"):
        train(recipe_of(tokenizer_pair.target, checkpoints=(200, 600)), tmp_path)


def test_later_checkpoints_and_other_sizes_go_on_with_the_same_run_and_another_seed_does_not(tokenizer_pair, tmp_path):
    recipe_of(tokenizer_pair.target).claim(tmp_path)
    recipe_of(tokenizer_pair.target, checkpoints=(200, 600, 900)).claim(tmp_path)
    with pytest.raises(ValueError, match=r"holds drafts whose --seed was 0, not 1"):
        recipe_of(tokenizer_pair.target, seed=1).claim(tmp_path)


def test_training_lowers_the_loss_and_what_is_kept_is_the_average(tokenizer_pair, tmp_path):
    target = FrozenTarget.load(tokenizer_pair.target, 64, "cpu")
    generator = torch.Generator().manual_seed(0)
    lessons = []
    for _ in range(6):
        tokens = torch.randint(1, toys.VOCAB_SIZE, (20,), generator=generator)
        lessons.append(Lesson(tokens, 5, tokens[5:, None], torch.ones(15, 1)))
    draft = fresh_draft(DraftShape(32), target, 0)
    losses, weights = [], []

    def on_step(tokens, loss):
        losses.append(loss)
        weights.append(draft.model.norm.weight.detach().clone())

    training = DraftTrainer(draft, lessons, 3, 0, tmp_path / "checkpoint.safetensors")
    assert training.train(40 * 45, float("inf"), on_step)
    assert len(losses) == 40
    assert losses[-1] < losses[0] / 2
    # Polynomial decay: the average of step t has moved by (g + 1) / (t + g) of the way to the weights.
    mean = weights[0]
    for t, weight in enumerate(weights[1:], start=2):
        mean = mean + (weight - mean) * (trainer.AVERAGED + 1) / (t + trainer.AVERAGED)
    assert torch.allclose(training.average.model.norm.weight, mean, atol=1e-6)


def test_a_batchs_rows_are_those_that_say_the_tokens_behind_the_prompts():
    def lesson(length, prompt):
        top = torch.arange(length - prompt)[:, None]
        return Lesson(torch.arange(100, 100 + length), prompt, top, torch.ones_like(top).float())

    batch = Batch.of([lesson(5, 2), lesson(3, 1)])
    assert batch.token_ids.tolist() == [[100, 101, 102, 103], [100, 101, 0, 0]]
    assert batch.rows.tolist() == [1, 2, 3, 4, 5]  # those of 101, 102, 103; and of 100 and 101 in the second
    assert batch.top_ids.flatten().tolist() == [0, 1, 2, 0, 1]
