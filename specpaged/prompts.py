"""Prompt files: JSON lines in Spec-Bench form, read and checked before any work."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from specpaged.config import ASSETS

SAMPLE_PROMPTS = ASSETS / "sample_prompts.jsonl"
T = TypeVar("T")


@dataclass(frozen=True)
class PromptRecord:
    """One prompt: the first turn of a Spec-Bench question."""

    question_id: int | str
    category: str
    text: str


def parse_prompts(lines: Iterable[str], name: str) -> list[PromptRecord]:
    """Prompts of JSON lines {"question_id": ..., "category": ..., "turns": [first turn, ...]}; blank lines are skipped.

    Raises:
        ValueError: naming the first bad line by number, and what is wrong with it.
    """
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"prompts={name!r} line {number} is not JSON: {error}") from None
        turns = entry.get("turns") if isinstance(entry, dict) else None
        if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0]:
            raise ValueError(
                f"prompts={name!r} line {number} has turns={turns!r}; allowed: an object whose 'turns' is a list "
                "that begins with a non-empty string"
            )
        if not (is_unicode(line) and is_unicode(turns[0])):
            raise ValueError(f"prompts={name!r} line {number} has bytes or surrogates outside UTF-8; allowed: UTF-8")
        records.append(PromptRecord(entry.get("question_id", number), str(entry.get("category", "")), turns[0]))
    if not records:
        raise ValueError(f"prompts={name!r} holds no prompt; allowed: one JSON object per line")
    return records


def load_prompts(source: str | Path | None) -> list[PromptRecord]:
    """Prompts of a file, of standard input ('-'), or (None) the embedded sample prompts."""
    if source == "-":
        try:
            return parse_prompts(sys.stdin, "-")
        except UnicodeDecodeError as error:
            raise ValueError(f"prompts='-' is not UTF-8: {error}; allowed: Unicode text") from None
    path = Path(source) if source is not None else SAMPLE_PROMPTS
    if not path.is_file():
        raise ValueError(f"prompts={str(source)!r} is not a file; allowed: a path to JSON lines, or '-'")
    # Bytes that are not UTF-8 come through as surrogates, so that their line can be named.
    with path.open(encoding="utf-8", errors="surrogateescape") as file:
        return parse_prompts(file, path.name)


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can write the text: it has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def evenly_spread(items: Sequence[T], count: int | None) -> list[T]:
    """`count` of the items at even distances, in order; all of them if there are no more."""
    if count is None or count >= len(items):
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]


def clip(token_ids: Sequence[Sequence[int]], max_tokens: int) -> tuple[list[list[int]], int]:
    """The first `max_tokens` tokens of each prompt, and how many prompts were longer."""
    clipped = [list(ids[:max_tokens]) for ids in token_ids]
    return clipped, sum(len(ids) > max_tokens for ids in token_ids)
