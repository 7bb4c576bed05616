"""Contenders that serve by turns: their time is that in which they ran, whatever came between."""

from __future__ import annotations

import json
import os
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer import BadParameter

from benchmarks.vllm_serving import __main__ as vllm_serving
from benchmarks.vllm_serving.contender import Contender, RunningTime, serve_by_turns
from benchmarks.vllm_serving.server import engine_arguments
from benchmarks.vllm_serving.show import summary

# Answers every line: a first token, one more after `work` of its own time, and one more.
SERVER = """
import json, sys, time
for line in sys.stdin:
    began = time.monotonic()
    until = time.process_time() + {work}
    while time.process_time() < until: pass
    now = time.monotonic()
    output = dict(came=began, times=[began, now, now], chunks=[[1], [2, 3], [int(line)]])
    print("something else")
    answer = dict(began=began, ended=now, outputs=[output], drafted=4, accepted=3, stage_seconds=0)
    print(json.dumps(answer), flush=True)
"""


@given(st.lists(st.integers(1, 20), min_size=1, max_size=9), st.data())
def test_time_stands_still_between_a_stop_and_the_next_start(lengths, data):
    running, now = RunningTime(), 0
    for i, length in enumerate(lengths):
        (running.stop if i % 2 else running.start)(now)
        now += length
    if len(lengths) % 2:
        running.stop(now)
    runs = [i % 2 == 0 for i, length in enumerate(lengths) for _ in range(length)]  # by second
    then = data.draw(st.integers(0, now))
    assert running.at(then) == sum(runs[:then])


def test_contenders_at_turn_answer_all_whatever_a_turn_holds(tmp_path):
    servers = []
    for work in (0.0, 0.3):  # of which the second takes several turns
        folder = tmp_path / str(work)
        folder.mkdir()
        server = Contender(f"work {work}", [sys.executable, "-c", SERVER.format(work=work)], 1, folder)
        server.ask(1)
        servers.append((server, server.answer()))
        assert _stops(server)
    assert all(first["token_ids"] == [[1, 2, 3, 1]] for _, first in servers)
    answers = serve_by_turns([server for server, _ in servers], 7, 0.05)
    for server, _ in servers:
        server.close()
    assert {name: answer["token_ids"] for name, answer in answers.items()} == {
        "work 0.0": [[1, 2, 3, 7]], "work 0.3": [[1, 2, 3, 7]]
    }  # fmt: skip
    assert all(answer["acceptance"] == 0.75 and answer["our_steps"] is None for answer in answers.values())


def test_an_answer_that_stops_cut_into_is_whole(tmp_path):
    told = "import sys; from benchmarks.vllm_serving.server import tell; {answer}; [tell(answer) for _ in sys.stdin]"
    answer = "answer = dict(began=0, ended=9, drafted=0, accepted=0, stage_seconds=0, outputs=[output] * 100_000)"
    output = "output = dict(came=1, times=[1, 2, 3], chunks=[[1], [2], [3]])"
    command = [sys.executable, "-u", "-c", told.format(answer=f"{output}; {answer}")]
    server = Contender("unbuffered", command, 1, tmp_path)
    server.ask(1)
    answered = server.answer(1e-4)
    while answered is None:
        server.go_on()
        answered = server.answer(1e-4)
    server.close()
    assert len(answered["token_ids"]) == 100_000


def test_an_answer_that_is_broken_ends_the_run(tmp_path):
    server = Contender("broken", [sys.executable, "-c", "input(); print('{\"began\": 0')"], 1, tmp_path)
    server.ask(1)
    with pytest.raises(json.JSONDecodeError):
        server.answer()
    server.close()


def _stops(server: Contender) -> bool:
    """Whether its process is stopped, or is so within a while."""
    for _ in range(500):
        if os.waitid(os.P_PID, server._process.pid, os.WSTOPPED | os.WNOWAIT | os.WNOHANG) is not None:
            return True
        time.sleep(0.01)
    return False


def test_a_contender_that_ends_is_named_with_its_last_words(tmp_path):
    server = Contender("late", [sys.executable, "-c", "raise SystemExit('no such model')"], 1, tmp_path)
    server.ask(1)
    with pytest.raises(RuntimeError, match=r"late failed:\nno such model"):
        server.answer()
    server.close()


@pytest.mark.parametrize("installed", [True, False])
def test_lookups_are_served_by_both_workers_and_suffixes_where_vllm_can(installed, monkeypatch, capsys):
    monkeypatch.setattr(vllm_serving, "find_spec", lambda name: name if installed else None)
    names = vllm_serving.contenders(lookups=True, decisions=False)
    methods = ("plain", "ngram", "suffix") if installed else ("plain", "ngram")
    assert names == tuple(f"{worker} {method}" for worker in ("vllm", "ours") for method in methods)
    assert ("arctic-inference" in capsys.readouterr().err) != installed
    with pytest.raises(BadParameter, match="--decisions"):
        vllm_serving.contenders(lookups=True, decisions=True)


def test_suffixes_are_looked_up_with_the_options_of_the_pair():
    settings = {"target": "t", "prompts": [[1]], "concurrency": [8], "num_speculative_tokens": 5}
    job = settings | {"speculative": {"method": "suffix", "suffix_decoding_max_cached_requests": 0}}
    for worker in ("vllm", "ours"):
        speculative = engine_arguments(f"{worker} suffix", job)["speculative_config"]
        assert speculative == job["speculative"] | {"num_speculative_tokens": 5}


def test_ratios_are_within_a_round_and_steps_of_whole_turns():
    def turn(speed: float, tokens: list[int]) -> dict:
        latencies = dict.fromkeys(("first_token_ms", "between_p50_ms", "between_p99_ms"), 1.0)
        return latencies | {
            "tokens_per_second": speed, "acceptance": None, "our_steps": speed / 100, "token_ids": [tokens, [1]]
        }  # fmt: skip

    rounds = [
        {8: {"ours plain": turn(plain, [1, 2]), "ours ngram": turn(ngram, [1, 3])}}
        for plain, ngram in ((10, 20), (100, 110), (20, 30))  # the machine was ten times as fast in between
    ]
    plain, ngram = summary(rounds, {8: {"ours plain": turn(50, []), "ours ngram": turn(60, [])}})
    assert (ngram["over_plain"], ngram["over_plain_spread"]) == (1.5, [1.1, 2.0])
    assert (plain["identical"], ngram["identical"]) == (1.0, 0.5)
    assert (plain["our_steps"], ngram["our_steps"]) == (0.5, 0.6)
    assert ngram["over_vllm"] is None
    assert json.dumps([plain, ngram])
