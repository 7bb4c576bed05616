"""A process that decodes with one library: `python -m benchmarks.cpu_peers.worker`, in an environment that has it.

Lines of JSON come in, and one goes out for each. The first says what to load, and is answered by the library's version,
or by what is missing; each further one holds prompts, as token ids, and is answered by outputs and seconds.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

MODULES = {"ours": "ours", "llama.cpp": "llama_cpp_decoder", "OpenVINO GenAI": "openvino_decoder"}


@dataclass(frozen=True)
class Job:
    """What a decoder is to load."""

    library: str  # one of MODULES
    weights: str  # the format of a library that has several
    kv: str  # what ours stores the target's KV as
    target: str
    draft: str | None  # None: it decodes plainly
    num_drafts: int | None  # None: as many as ours decides
    threads: int
    max_num_seqs: int
    max_model_len: int
    converted: str  # folder of models in the library's own format: made where there is none


class Decoder(Protocol):
    """A loaded library."""

    version: str

    def decode(self, prompts: Sequence[Sequence[int]], output_len: int) -> list[list[int]]:
        """Greedy outputs of this length, of all prompts at once."""


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    job = Job(**json.loads(sys.stdin.readline()))
    try:
        decoder: Decoder = importlib.import_module(f"benchmarks.cpu_peers.{MODULES[job.library]}").load(job)
    except Exception as error:
        answer(missing=f"{type(error).__name__}: {error}".splitlines()[0])
        return
    answer(version=decoder.version)
    for line in sys.stdin:
        wanted = json.loads(line)
        prompts, batch_size = wanted["prompts"], wanted["batch_size"]
        token_ids: list[list[int]] = []
        start = time.perf_counter()
        for first in range(0, len(prompts), batch_size):
            token_ids += decoder.decode(prompts[first : first + batch_size], wanted["output_len"])
        answer(token_ids=token_ids, seconds=time.perf_counter() - start)


if __name__ == "__main__":
    main()
