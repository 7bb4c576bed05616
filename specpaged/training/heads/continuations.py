"""What the target writes behind the prompts: the text that its heads learn from and are measured on.

Kept as JSON lines of token ids. Hidden states are not kept: they are computed again from these.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from specpaged.config import EMBEDDED_TARGET
from specpaged.llm import LLM
from specpaged.modeling.numerics import InexactError
from specpaged.sampling_params import SamplingParams
from specpaged.training.quality import cycle_period

SAMPLED_TEMPERATURE = 0.8  # of every other continuation; the rest are greedy
BATCH = 32  # sequences that the engine runs at a time
UNIT = 64  # continuations between two writes to the file
MIN_TOKENS = 2
MIN_PREFIX = 16


@dataclass(frozen=True)
class Continuation:
    """A prompt and what came behind it."""

    prompt_token_ids: list[int]
    token_ids: list[int]

    @property
    def all_token_ids(self) -> list[int]:
        """Both, in order."""
        return self.prompt_token_ids + self.token_ids


@dataclass(frozen=True)
class Request:
    """What the engine is asked for."""

    prompt_token_ids: list[int]
    temperature: float
    seed: int


def request_of(prompts: list[list[int]], index: int, seed: int) -> Request:
    """Request `index`, a function of its arguments.

    The prompts come in a seeded order, over and over. The first two times they are whole, once greedily and once
    sampled; later they are cut somewhere, as a greedy continuation of the same prompt would be the same.
    """
    epoch, place = divmod(index, len(prompts))
    which = int(np.random.default_rng((seed, 3, epoch)).permutation(len(prompts))[place])
    prompt = prompts[which]
    greedy = (which + epoch) % 2 == 0
    rng = np.random.default_rng((seed, 5, index))
    if epoch >= 2:
        prompt = prompt[: int(rng.integers(min(MIN_PREFIX, len(prompt)), len(prompt) + 1))]
    return Request(prompt, 0.0 if greedy else SAMPLED_TEMPERATURE, int(rng.integers(2**63)))


def open_engine(
    target: str, sequence_length: int, device: str, speculative_config: dict[str, Any] | None = None
) -> LLM:
    """An engine whose outputs depend on nothing but prompt and seed; where there can be none, a fast one."""
    arguments = {
        "device": device,
        "model_impl": "flat",
        "max_num_seqs": BATCH,
        "max_model_len": sequence_length,
    }
    model = target
    if speculative_config is not None:
        arguments["speculative_config"] = speculative_config
    elif target == EMBEDDED_TARGET:  # which has a draft model
        model = None
    try:
        return LLM(model, **arguments)
    except InexactError:
        return LLM(model, numerics="fast", **arguments)


class ContinuationFile:
    """Continuations on disk, written a unit at a time. What was cut off within one is written again."""

    def __init__(self, path: Path):
        self.path = path
        self._state_path = path.with_suffix(".state.json")
        self.count, self.seconds, self.is_complete, self._num_bytes = 0, 0.0, False, 0
        if self._state_path.is_file():
            state = json.loads(self._state_path.read_text())
            self.count, self.seconds, self.is_complete = state["count"], state["seconds"], state["complete"]
            self._num_bytes = state["bytes"]

    def write(
        self,
        llm: LLM,
        request_at: Callable[[int], Request],
        count: int,
        seconds: float | None,
        on_progress: Callable[[int], object],
    ) -> None:
        """Ask for continuations up to `count` of them, or until `seconds` are used up."""
        with self.path.open("ab") as file:
            file.truncate(self._num_bytes)
            last = time.monotonic()
            while not self.is_complete:
                unit = [request_at(i) for i in range(self.count, min(count, self.count + UNIT))]
                file.writelines(json.dumps(record).encode() + b"\n" for record in _answers(llm, unit))
                file.flush()
                self._num_bytes = file.tell()
                now = time.monotonic()
                self.count, self.seconds, last = self.count + len(unit), self.seconds + now - last, now
                self.is_complete = self.count >= count or (seconds is not None and self.seconds >= seconds)
                self._save_state()
                on_progress(self.count)

    def read(self) -> list[Continuation]:
        """All that hold more than a token or two, each cut where it begins to repeat itself."""
        return [
            Continuation(entry["prompt_token_ids"], tokens)
            for entry in self._entries()
            if len(tokens := before_repetition(entry["token_ids"])) >= MIN_TOKENS
        ]

    def _entries(self) -> Iterator[dict]:
        with self.path.open(encoding="utf-8") as file:
            yield from map(json.loads, islice(file, self.count))

    def _save_state(self) -> None:
        state = {"count": self.count, "seconds": self.seconds, "complete": self.is_complete, "bytes": self._num_bytes}
        partial = self._state_path.with_suffix(".partial")
        partial.write_text(json.dumps(state))
        os.replace(partial, self._state_path)


def before_repetition(token_ids: list[int]) -> list[int]:
    """The tokens before the second copy of what stands at the end three times, however long that is."""
    period, end = cycle_period(token_ids, max_period=len(token_ids)), len(token_ids)
    while period and end > period and token_ids[end - 1] == token_ids[end - 1 - period]:
        end -= 1
    return token_ids[:end]


def _answers(llm: LLM, requests: list[Request]) -> Iterator[dict]:
    """A record for each request; one that fails has no tokens."""
    longest = llm.config.max_model_len
    params = [
        SamplingParams(
            temperature=request.temperature,
            seed=request.seed,
            max_tokens=longest - len(request.prompt_token_ids),
            detokenize=False,
        )
        for request in requests
    ]
    outputs = llm.generate([{"prompt_token_ids": r.prompt_token_ids} for r in requests], params, use_tqdm=False)
    for request, output in zip(requests, outputs, strict=True):
        yield {
            "prompt_token_ids": list(request.prompt_token_ids),
            "token_ids": list(output.outputs[0].token_ids) if output.outputs else [],
            "temperature": request.temperature,
            "seed": request.seed,
        }
