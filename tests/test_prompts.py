"""Prompt files are read whole or refused with the number of the first bad line; selections are evenly spread."""

from __future__ import annotations

import io
import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specpaged.prompts import PromptRecord, clip, evenly_spread, load_prompts, parse_prompts

GOOD = '{"question_id": 7, "category": "qa", "turns": ["first", "second"]}'


def test_the_first_turn_is_the_prompt():
    assert parse_prompts([GOOD], "file") == [PromptRecord(7, "qa", "first")]


def test_what_is_left_out_has_defaults_and_other_keys_are_ignored():
    assert parse_prompts(['{"turns": ["x"], "reference": [1]}'], "file") == [PromptRecord(1, "", "x")]


def test_blank_lines_are_skipped_but_counted():
    records = parse_prompts(["\n", '{"turns": ["a"]}\n', "  \n", '{"turns": ["b"]}'], "file")
    assert [(record.question_id, record.text) for record in records] == [(2, "a"), (4, "b")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", "is not JSON"),
        ('{"turns": ["x"]', "is not JSON"),
        ("1" * 5000, "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "turns=None"),
        ("7", "turns=None"),
        ("null", "turns=None"),
        ("{}", "turns=None"),
        ('{"turns": "text"}', "turns='text'"),
        ('{"turns": []}', r"turns=\[\]"),
        ('{"turns": [""]}', r"turns=\[''\]"),
        ('{"turns": [5]}', r"turns=\[5\]"),
        ('{"turns": [null, "x"]}', r"turns=\[None, 'x'\]"),
        (r'{"turns": ["a \ud800 b"]}', "allowed: UTF-8"),
    ],
)
def test_a_bad_line_is_named_by_number(line, message):
    with pytest.raises(ValueError, match=f"^prompts='questions.jsonl' line 3 .*{message}"):
        parse_prompts([GOOD, "\n", line, "also bad"], "questions.jsonl")


def test_a_file_without_prompts_is_refused():
    for lines in ([], ["\n", "  "]):
        with pytest.raises(
            ValueError, match=r"prompts='empty\.jsonl' holds no prompt; allowed: one JSON object per line"
        ):
            parse_prompts(lines, "empty.jsonl")


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(), st.text(), st.text(min_size=1)), min_size=1), st.booleans())
def test_whatever_text_json_can_write_comes_back(entries, ascii_only):
    lines = [
        json.dumps({"question_id": i, "category": category, "turns": [text, ""]}, ensure_ascii=ascii_only)
        for i, category, text in entries
    ]
    assert parse_prompts(lines, "file") == [PromptRecord(*entry) for entry in entries]


def test_a_file_may_end_its_lines_in_any_way_and_hold_line_separators_in_a_text(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes('{"turns": ["a\u2028b"]}\r\n{"turns": ["\u00e9"]}\n{"turns": ["z"]}'.encode())
    assert [record.text for record in load_prompts(path)] == ["a\u2028b", "\u00e9", "z"]
    assert load_prompts(str(path)) == load_prompts(path)


def test_a_line_that_is_not_utf_8_is_named_by_number(tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(GOOD.encode() + b'\n{"turns": ["caf\xe9"]}\n' + GOOD.encode())
    with pytest.raises(ValueError, match=r"prompts='latin.jsonl' line 2 .* allowed: UTF-8"):
        load_prompts(path)


def test_a_path_that_is_no_file_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "nothing.jsonl"):
        with pytest.raises(ValueError, match=r"prompts='.*' is not a file; allowed: a path to JSON lines, or '-'"):
            load_prompts(path)


def test_a_dash_reads_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(GOOD + "\n"))
    assert load_prompts("-") == [PromptRecord(7, "qa", "first")]
    monkeypatch.setattr(sys, "stdin", io.StringIO(GOOD + "\n{}\n"))
    with pytest.raises(ValueError, match="prompts='-' line 2 has turns=None"):
        load_prompts("-")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))
    with pytest.raises(ValueError, match="prompts='-' is not UTF-8"):
        load_prompts("-")


def test_the_sample_prompts_are_good():
    records = load_prompts(None)
    assert len(records) == len({record.question_id for record in records})
    assert all(record.text.strip() for record in records)


def test_a_selection_is_spread_as_in_this_example():
    assert evenly_spread("abcdefghij", 4) == ["a", "c", "f", "h"]
    assert evenly_spread("abcdefghij", 1) == ["a"]
    assert evenly_spread("abc", 3) == evenly_spread("abc", 9) == evenly_spread("abc", None) == ["a", "b", "c"]


@given(st.integers(0, 600), st.integers(1, 600))
def test_a_selection_has_the_size_asked_for_and_even_gaps(total, count):
    chosen = evenly_spread(range(total), count)
    assert len(chosen) == min(total, count)
    if 0 < count <= total:
        gaps = {b - a for a, b in zip(chosen, [*chosen[1:], total], strict=True)}
        assert chosen[0] == 0
        assert gaps <= {total // count, -(-total // count)}  # as even as ints allow: in order, no repetition


@given(st.lists(st.lists(st.integers(0, 9))), st.integers(1, 12))
def test_clipping_keeps_beginnings_and_counts_what_was_longer(token_ids, max_tokens):
    clipped, num_clipped = clip(token_ids, max_tokens)
    assert num_clipped == sum(short != ids for short, ids in zip(clipped, token_ids, strict=True))
    for short, ids in zip(clipped, token_ids, strict=True):
        assert len(short) == min(len(ids), max_tokens)
        assert ids[: len(short)] == short
