"""A contender's processes, which serve by turns: while others do, they are stopped, and so is their time."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median, quantiles
from typing import Any


class RunningTime:
    """Seconds that processes have run, of those of the monotonic clock.

    clock     0   1   2   3   4   5   6
    runs          |-------|       |---
    at(clock)     0   1   2   2   2   3
    """

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._stops: list[float] = []
        self._before: list[float] = []  # seconds, until each start

    def start(self, now: float) -> None:
        """They run from now on."""
        ran = self._before[-1] + self._stops[-1] - self._starts[-1] if self._starts else 0.0
        self._before.append(ran)
        self._starts.append(now)

    def stop(self, now: float) -> None:
        """They have run until now."""
        self._stops.append(now)

    def at(self, then: float) -> float:
        """How long they had run then: a time at which they had started once, and before they were stopped last."""
        i = bisect_right(self._starts, then) - 1
        return self._before[i] + min(then, self._stops[i]) - self._starts[i]


class Contender:
    """Serves in a group of processes of its own, by that command, as often as it is asked to, and when it is let.

    The command reads a level of concurrency from a line, and answers by a line as `server.serve` does.
    """

    def __init__(self, name: str, command: Sequence[str], threads: int, folder: Path):
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "PROMETHEUS_MULTIPROC_DIR": str(folder),
        }
        self.name = name
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._errors = folder / "errors.txt"
        self._time = RunningTime()
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                start_new_session=True,
            )  # fmt: skip
        self._time.start(time.monotonic())
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, level: int) -> None:
        """For a turn at this concurrency."""
        with suppress(BrokenPipeError):  # that it has ended is said where its answer is read
            print(level, file=self._process.stdin, flush=True)

    def answer(self, seconds: float | None = None) -> dict[str, Any] | None:
        """What came of what it was asked for; None, and it is stopped, if it takes longer than so many seconds.

        RuntimeError, with what it said last, if the process has ended.
        """
        try:
            answer = self._answers.get(timeout=seconds)
        except queue.Empty:
            return None
        finally:
            self._signal(signal.SIGSTOP)
            self._time.stop(time.monotonic())
        if answer is None:
            raise RuntimeError(f"{self.name} failed:\n{self._errors.read_text()[-3000:]}")
        return _figures(json.loads(answer), self._time)

    def go_on(self) -> None:
        """It is stopped no longer."""
        self._time.start(time.monotonic())
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End the process."""
        self._signal(signal.SIGCONT)
        with suppress(BrokenPipeError):  # of one that has ended before it was asked
            self._process.stdin.close()
        self._process.wait()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _read(self) -> None:
        for line in self._process.stdout:
            if line.startswith("{"):  # vLLM may print, too
                self._answers.put(line)
        self._answers.put(None)


def serve_by_turns(
    contenders: Sequence[Contender], level: int, seconds: float | None = None
) -> dict[str, dict[str, Any]]:
    """What comes of the same requests with all of them, who are stopped: each for so many seconds, until all are done.

    Without `seconds` one after another.
    """
    for contender in contenders:
        contender.ask(level)
    answers: dict[str, dict[str, Any]] = {}
    while len(answers) < len(contenders):
        for contender in contenders:
            if contender.name not in answers:
                contender.go_on()
                answer = contender.answer(seconds)
                if answer is not None:
                    answers[contender.name] = answer
    return answers


def _figures(answer: dict[str, Any], time_of: RunningTime) -> dict[str, Any]:
    """Of the requests of a turn, in the time that the contender ran."""
    firsts, gaps = [], []
    for output in answer["outputs"]:
        times = [time_of.at(then) for then in (output["came"], *output["times"])]
        firsts.append(times[1] - times[0])
        for before, now, chunk in zip(times[1:], times[2:], output["chunks"][1:], strict=False):
            gaps += [(now - before) / len(chunk)] * len(chunk)
    cuts = quantiles(gaps, n=100, method="inclusive")
    seconds = time_of.at(answer["ended"]) - time_of.at(answer["began"])
    token_ids = [[token_id for chunk in output["chunks"] for token_id in chunk] for output in answer["outputs"]]
    return {
        "tokens_per_second": sum(map(len, token_ids)) / seconds,
        "first_token_ms": 1e3 * median(firsts),
        "between_p50_ms": 1e3 * cuts[49],
        "between_p99_ms": 1e3 * cuts[98],
        "acceptance": answer["accepted"] / answer["drafted"] if answer["drafted"] else None,
        "our_steps": answer["stage_seconds"] / seconds if answer["stage_seconds"] else None,
        "token_ids": token_ids,
    }
