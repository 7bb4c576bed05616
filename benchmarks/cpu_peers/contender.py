"""A process that decodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.cpu_peers.ways import OURS, Way
from benchmarks.cpu_peers.worker import Job
from benchmarks.environment import ROOT


class Contender:
    """A library that is loaded in a process of its own, and waits there, asleep, for its turns.

    `python` is the interpreter of the environment that has the others' packages. Where something is wanting, `missing`
    says what.
    """

    def __init__(self, name: str, way: Way, python: str, job: Job):
        self.name = name
        self.missing: str | None = None
        self.version: str | None = None
        build = Path(python).absolute().parents[1] / way.build
        if way.build and not build.is_dir():
            self.missing = f"there is no build {way.build!r}, which is made where CPUs have AVX-512"
            return
        is_ours = way.library == OURS
        # Our kernels are this checkout's, too, whatever is installed.
        folders = [ROOT, ROOT / "kernels"] if is_ours else [build, ROOT] if way.build else [ROOT]
        self._process = subprocess.Popen(
            [sys.executable if is_ours else python, "-m", "benchmarks.cpu_peers.worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            stderr=None if is_ours else subprocess.DEVNULL,  # ours is silent unless something is wrong
            env=os.environ
            | {"OMP_NUM_THREADS": str(job.threads), "PYTHONPATH": os.pathsep.join(map(str, folders))},
        )  # fmt: skip
        answer = self._ask(asdict(job))
        self.missing, self.version = answer.get("missing"), answer.get("version")

    def decode(
        self, prompts: Sequence[Sequence[int]], batch_size: int, output_len: int
    ) -> tuple[list[list[int]], float]:
        """Outputs, and seconds. RuntimeError if it cannot."""
        answer = self._ask({"prompts": prompts, "batch_size": batch_size, "output_len": output_len})
        if "missing" in answer:
            raise RuntimeError(f"{self.name}: {answer['missing']}")
        return answer["token_ids"], answer["seconds"]

    def end(self) -> None:
        """End the process, if there is one."""
        if hasattr(self, "_process"):
            self._process.stdin.close()
            self._process.wait()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        return json.loads(line) if line else {"missing": f"its process ended with status {self._process.wait()}"}
