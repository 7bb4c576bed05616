"""What is shown of measured memory; and the measurement itself, on a toy."""

from __future__ import annotations

import sys

import pytest

from benchmarks import memory
from benchmarks.adaptive.pairs import Pair
from tests import toys

LINUX = sys.platform == "linux"


@pytest.mark.skipif(not LINUX, reason="a process's peak is read from Linux's /proc")
@pytest.mark.parametrize("k", [2, 0])
def test_a_peak_is_measured_beside_the_plan(tokenizer_pair, k, monkeypatch):
    monkeypatch.setattr(memory, "MAX_MODEL_LEN", 96)
    prompts = [prompt["prompt_token_ids"] for prompt in toys.prompts(64, longest=20)]
    figures = memory._measured(Pair("toys", tokenizer_pair.target, {"model": tokenizer_pair.draft}, prompts), k)
    assert figures["peak"] > figures["imports"] + memory.KV_BYTES
    assert figures["floor"] > memory.KV_BYTES
    assert figures["planned"] > figures["floor"]
    assert figures["share"] == round((figures["peak"] - figures["imports"]) / figures["planned"], 4)


def test_a_line_for_each_cell_and_a_picture(tmp_path, capsys):
    cell = {"floor": 8_000_000, "buffers": 3_000_000, "planned": 10_900_000, "peak": 61_000_000, "imports": 50_000_000}
    memory.show({"embedded; K = 5": cell | {"share": 1.0092}}, tmp_path / "memory.png")
    assert "1.009" in capsys.readouterr().out
    assert (tmp_path / "memory.png").stat().st_size > 5_000


def test_what_is_neither_k_nor_all_ends_in_a_sentence():
    for arguments in ([], ["some"], ["all"], ["all", "a file", "another"]):
        with pytest.raises(SystemExit, match=r"^usage: python -m benchmarks.memory K \[PAIR\]"):
            memory.command(arguments)
