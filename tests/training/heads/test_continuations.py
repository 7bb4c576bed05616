"""What the target writes: mixed, resumable, cut where it repeats itself; and the prompts that it writes behind."""

from __future__ import annotations

import json

import pytest

from specpaged.llm import LLM
from specpaged.training.heads import continuations as module
from specpaged.training.heads.continuations import ContinuationFile, before_repetition, request_of
from specpaged.training.heads.prompt_data import MIN_PROMPTS, read_data, tokenize
from tests.toys import byte_tokenizer

PROMPTS = [list(range(10 * i + 1, 10 * i + 9)) for i in range(6)]


def test_every_prompt_comes_greedily_and_sampled_before_any_is_cut():
    requests = [request_of(PROMPTS, index, seed=0) for index in range(4 * len(PROMPTS))]
    whole = requests[: 2 * len(PROMPTS)]
    assert sorted((r.prompt_token_ids, r.temperature) for r in whole) == sorted(
        (prompt, temperature) for prompt in PROMPTS for temperature in (0.0, 0.8)
    )
    assert {r.temperature for r in requests[2 * len(PROMPTS) :]} == {0.0, 0.8}
    assert len({r.seed for r in requests}) == len(requests)
    assert requests == [request_of(PROMPTS, index, seed=0) for index in range(4 * len(PROMPTS))]


def test_a_file_that_was_cut_is_completed_to_the_same(toy_pair, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "UNIT", 3)
    llm = LLM(toy_pair.target, max_model_len=24)

    def write(path, fails_at=None):
        def request_at(index):
            if index == fails_at:
                raise KeyboardInterrupt
            return request_of(PROMPTS, index, seed=0)

        file = ContinuationFile(path)
        file.write(llm, request_at, 8, None, lambda count: None)
        return file

    whole = write(tmp_path / "whole.jsonl")
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "cut.jsonl", fails_at=4)
    with (tmp_path / "cut.jsonl").open("a") as file:
        file.write('{"prompt_tok')  # what a power cut may leave
    cut = write(tmp_path / "cut.jsonl")
    assert (tmp_path / "cut.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert cut.is_complete
    assert cut.read() == whole.read()
    for line in (tmp_path / "whole.jsonl").read_text().splitlines():
        entry = json.loads(line)
        assert len(entry["prompt_token_ids"]) + len(entry["token_ids"]) <= 24


def test_text_ends_before_the_second_copy_of_what_it_repeats():
    assert before_repetition([1, 2, 3, 4, 5, 4, 5, 4, 5]) == [1, 2, 3, 4, 5]
    long = list(range(40, 100))
    assert before_repetition([1, *long * 3]) == [1, *long]
    assert before_repetition([1, 2, 3]) == [1, 2, 3]


def test_questions_and_stretches_of_a_text_are_held_out_evenly(tmp_path):
    tokenizer = byte_tokenizer()
    questions = tmp_path / "questions"
    questions.write_text("".join(json.dumps({"turns": [f"question {i} of many"]}) + "\n" for i in range(32)))
    prompts = tokenize(read_data(str(questions)), tokenizer, "toy", 64)
    held_out = [tokenizer.decode(ids) for ids in prompts.held_out]
    assert held_out == [f"question {i} of many" for i in (4, 12, 20, 28)]
    assert len(prompts.train) == 28
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    prompts = tokenize(read_data(str(text)), tokenizer, "toy", 64)
    whole = tokenizer.encode(text.read_text())
    stretches = [whole[i : i + 16] for i in range(0, len(whole) - 15, 16)]
    num_held_out = len(stretches) // 8
    held_out = [(2 * i + 1) * len(stretches) // (2 * num_held_out) for i in range(num_held_out)]
    assert prompts.held_out == [stretches[i] for i in held_out]
    assert prompts.train == [ids for i, ids in enumerate(stretches) if i not in held_out]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is not a file"),
        (b"", "is empty"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"turns": []}', "line 1 has turns="),
        (b'{"turns": ["a"]}\n' * (MIN_PROMPTS - 1), f"allowed: {MIN_PROMPTS} or more"),
    ],
)
def test_data_that_cannot_be_used_is_named(tmp_path, content, message):
    path = tmp_path / "data"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"--data=") as error:
        read_data(str(path))
    assert message in str(error.value)
