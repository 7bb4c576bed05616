"""Lessons: the target's own text, and its own opinion of each token, whatever file they lie in."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from specpaged.training.heads.continuations import open_engine
from specpaged.training.heads.target import FrozenTarget
from specpaged.training.scaling import lessons
from specpaged.training.scaling.lessons import LessonFiles, request_of
from specpaged.training.scaling.shape import DraftShape, parse_shapes
from tests import toys

LENGTH = 40
PROMPTS = [prompt["prompt_token_ids"] for prompt in toys.prompts(5, shortest=8, longest=20)]


@pytest.fixture(scope="module")
def written(tokenizer_pair, tmp_path_factory):
    files = LessonFiles(tmp_path_factory.mktemp("lessons"), PROMPTS, 12, seed=3)
    llm, target = (
        open_engine(tokenizer_pair.target, LENGTH, "cpu"),
        FrozenTarget.load(tokenizer_pair.target, LENGTH, "cpu"),
    )
    for number in files.missing:
        files.write(number, llm, target, LENGTH)
    return files


def test_top_tokens_are_what_the_target_thinks_of_each_token_behind_the_prompt(written, tokenizer_pair):
    assert written.missing == []
    model = AutoModelForCausalLM.from_pretrained(tokenizer_pair.target, dtype=torch.float32).eval()
    read = written.read()
    assert len(read) > 6
    for lesson in read:
        assert len(lesson.token_ids) <= LENGTH
        assert lesson.num_tokens == len(lesson.token_ids) - lesson.prompt_length > 0
        with torch.no_grad():
            logits = model(input_ids=lesson.token_ids[None]).logits[0, lesson.prompt_length - 1 : -1]
        expected = logits.softmax(-1).topk(lessons.TOP)
        assert torch.allclose(lesson.top_probs, expected.values, atol=2e-3)
        assert (lesson.top_ids[:, 0] == expected.indices[:, 0]).float().mean() > 0.99


def test_by_turns_continuations_are_greedy_and_sampled(written):
    greedy, sampled = (request_of(PROMPTS, i, 3)[1] for i in (0, 1))
    assert (greedy, sampled) == (0.0, 1.0)
    of_greedy = [
        lesson
        for lesson in written.read()
        if torch.equal(lesson.token_ids[lesson.prompt_length :], lesson.top_ids[:, 0])
    ]
    assert 4 <= len(of_greedy) <= 8


def test_requests_are_a_function_of_their_number():
    requests = [request_of(PROMPTS, i, 3) for i in range(200)]
    assert requests == [request_of(PROMPTS, i, 3) for i in range(200)]
    assert requests != [request_of(PROMPTS, i, 4) for i in range(200)]
    for i, (prompt, _, _) in enumerate(requests):
        whole = next(p for p in PROMPTS if p[: len(prompt)] == prompt)
        assert len(prompt) >= (len(whole) // 2 if i % 2 == 0 else lessons.SHORTEST_PREFIX)


@pytest.mark.parametrize("text", ["", "0", "33", "64x0", "64x", "x2", "64x2x2", "-32", "6.4"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match=r"--sizes: '.*' (is no size|has width)"):
        DraftShape.parse(text)


def test_sizes_are_widths_and_layers():
    shapes = parse_shapes("64, 32x2,64")
    assert shapes == [DraftShape(64), DraftShape(32, 2)]
    assert [shape.name for shape in shapes] == ["64", "32x2"]
