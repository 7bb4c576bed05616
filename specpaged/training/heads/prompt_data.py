"""The prompts that a target is asked to go on with: of a file, split, as token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from specpaged.chat import ChatRenderer
from specpaged.prompts import is_unicode, parse_prompts

MIN_PROMPTS = 8
HELD_OUT_SHARE = 8  # one in so many
MAX_HELD_OUT = 64
MAX_TEXT_BYTES = 16 * 2**20
MIN_PROMPT_TOKENS = 2


@dataclass(frozen=True)
class Data:
    """A file of prompts: JSON lines in Spec-Bench form, or plain text, which is cut into prompts."""

    path: str
    questions: tuple[str, ...]  # of JSON lines
    text: str | None  # where it is plain


@dataclass(frozen=True)
class Prompts:
    """Token ids, split into those to train on and those to measure with."""

    train: list[list[int]]
    held_out: list[list[int]]


def read_data(path: str) -> Data:
    """What the file holds. Raises ValueError, naming --data, where it cannot be read or holds too little."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"--data={path!r} is not a file; allowed: JSON lines in Spec-Bench form, or plain text")
    try:
        with file.open("rb") as stream:
            raw = stream.read(MAX_TEXT_BYTES)
    except OSError as error:
        raise ValueError(f"--data={path!r} cannot be read: {error.strerror}") from None
    if file.suffix == ".jsonl" or _is_json_lines(raw):
        with file.open(encoding="utf-8", errors="surrogateescape") as lines:
            try:
                records = parse_prompts(lines, path)
            except ValueError as error:
                raise ValueError(str(error).replace("prompts=", "--data=", 1)) from None
        if len(records) < MIN_PROMPTS:
            raise ValueError(f"--data={path!r} holds {len(records)} prompts; allowed: {MIN_PROMPTS} or more")
        return Data(path, tuple(record.text for record in records), None)
    text = raw.decode("utf-8", errors="replace" if len(raw) == MAX_TEXT_BYTES else "surrogateescape")
    if not text.strip() or not is_unicode(text):
        raise ValueError(f"--data={path!r} is empty or not UTF-8; allowed: JSON lines in Spec-Bench form, or text")
    return Data(path, (), text)


def tokenize(data: Data, tokenizer: PreTrainedTokenizerBase, target: str, sequence_length: int) -> Prompts:
    """At most half of `sequence_length` tokens each; one in HELD_OUT_SHARE is held out.

    Questions go through the tokenizer's chat template, if it has one. A text is cut into stretches of a quarter of
    `sequence_length`. Those held out are spread evenly, as a text's end may be like nothing else in it. ValueError
    where there are fewer than MIN_PROMPTS.
    """
    if data.text is None:
        prompts = [ids[: sequence_length // 2] for ids in _encoded(data.questions, tokenizer, target)]
        prompts = [ids for ids in prompts if len(ids) >= MIN_PROMPT_TOKENS]
    else:
        token_ids = tokenizer.encode(data.text, add_special_tokens=False, verbose=False)
        prompts = list(_stretches(token_ids, sequence_length // 4))
    if len(prompts) < MIN_PROMPTS:
        raise ValueError(
            f"--data={data.path!r} makes {len(prompts)} prompts of at least {MIN_PROMPT_TOKENS} tokens at "
            f"--sequence-length={sequence_length}; allowed: {MIN_PROMPTS} or more"
        )
    num_held_out = min(MAX_HELD_OUT, max(2, len(prompts) // HELD_OUT_SHARE))
    held_out = {(2 * i + 1) * len(prompts) // (2 * num_held_out) for i in range(num_held_out)}
    return Prompts([ids for i, ids in enumerate(prompts) if i not in held_out], [prompts[i] for i in sorted(held_out)])


def _encoded(questions: tuple[str, ...], tokenizer: PreTrainedTokenizerBase, target: str) -> Iterator[list[int]]:
    if tokenizer.chat_template:
        renderer = ChatRenderer(tokenizer, target)
        for text in questions:
            yield renderer.render([{"role": "user", "content": text}])[1]
    else:
        yield from (tokenizer.encode(text, verbose=False) for text in questions)


def _stretches(token_ids: list[int], length: int) -> Iterator[list[int]]:
    rest = iter(token_ids)
    while len(stretch := list(islice(rest, length))) == length:
        yield stretch


def _is_json_lines(raw: bytes) -> bool:
    """Whether the first line that is not blank is a JSON object."""
    first = next((line for line in raw[: 2**20].split(b"\n") if line.strip()), b"")
    if not first.lstrip().startswith(b"{"):
        return False
    try:
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False
