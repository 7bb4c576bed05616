"""Models and prompts of a study, checked before anything is decoded; and how a method decodes them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from specpaged.checks import check_choice
from specpaged.config import EMBEDDED_DRAFT, EMBEDDED_TARGET, NUMERICS
from specpaged.llm import LLM
from specpaged.metrics import EngineMetrics
from specpaged.prompts import clip, evenly_spread, load_prompts
from specpaged.research import kv_memory
from specpaged.sampling_params import SamplingParams
from specpaged.studies.method import Method, check_methods

EMBEDDED = "embedded"
MAX_NUM_BATCHED_TOKENS = 2048


@dataclass(frozen=True)
class Pair:
    """A target and its draft: local paths or hub ids."""

    target: str
    draft: str

    @classmethod
    def parse(cls, text: str) -> Pair:
        """The pair that 'TARGET,DRAFT' or 'embedded' names. ValueError for any other text."""
        if text == EMBEDDED:
            return cls(EMBEDDED_TARGET, EMBEDDED_DRAFT)
        names = text.split(",")
        if len(names) != 2 or not all(names):
            raise ValueError(f"--models={text!r} must be TARGET,DRAFT (local paths or hub ids) or {EMBEDDED!r}")
        return cls(*names)

    @property
    def name(self) -> str:
        """The models' names without the folders that they lie in."""
        if self.target == EMBEDDED_TARGET:
            return EMBEDDED
        return " + ".join(Path(name).name for name in (self.target, self.draft))


@dataclass(frozen=True)
class Run:
    """One method's decoding of all prompts."""

    token_ids: list[list[int]]
    seconds: float
    metrics: EngineMetrics
    latencies: list[float] = field(default_factory=list)  # of each prompt, from its arrival on

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens by wall time, prefill included."""
        return sum(map(len, self.token_ids)) / self.seconds


@dataclass(frozen=True)
class Workload:
    """What all methods of a study decode, and on what."""

    pair: Pair
    prompts: list[list[int]]
    params: SamplingParams
    num_speculative_tokens: int
    window: int | None
    engine_arguments: dict[str, Any]
    max_model_len: int

    def make_llm(self, method: Method, batch_size: int) -> LLM:
        """An engine that runs the method in batches of this size."""
        speculative = None
        if not method.plain:
            speculative = {"model": self.pair.draft, "num_speculative_tokens": self.num_speculative_tokens}
        llm = LLM(
            self.pair.target,
            speculative_config=speculative,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=max(MAX_NUM_BATCHED_TOKENS, batch_size),
            **method.engine_arguments(batch_size, self.window),
            **self.engine_arguments,
        )
        method.apply(llm)
        return llm

    def decode(
        self,
        llm: LLM,
        prompts: Sequence[Sequence[int]] | None = None,
        arrivals: Sequence[float] | None = None,
        progress: Callable[[int], object] = lambda num_ended: None,
    ) -> Run:
        """Decode all prompts.

        They are there from the start, or arrive each at its time, in seconds from the start.
        """
        prompts = self.prompts if prompts is None else prompts
        arrivals = arrivals or [0.0] * len(prompts)
        engine = llm.engine
        engine.reset_metrics()
        token_ids: list[list[int]] = [[] for _ in prompts]
        latencies = [0.0] * len(prompts)
        num_added = 0
        start = time.perf_counter()
        while num_added < len(prompts) or engine.has_unfinished_requests:
            now = time.perf_counter() - start
            while num_added < len(prompts) and arrivals[num_added] <= now:
                engine.add_request(str(num_added), prompts[num_added], self.params)
                num_added += 1
            if not engine.has_unfinished_requests:
                time.sleep(arrivals[num_added] - now)
                continue
            ended = engine.step()
            for output in ended:
                idx = int(output.request_id)
                if output.error:
                    raise RuntimeError(f"prompt {idx}: {output.error}")
                token_ids[idx] = output.outputs[0].token_ids
                latencies[idx] = time.perf_counter() - start - arrivals[idx]
            if ended:
                progress(len(ended))
        seconds = time.perf_counter() - start
        engine.check_integrity()
        return Run(token_ids, seconds, engine.metrics, latencies)


@dataclass(frozen=True)
class Options:
    """What the commands of `specpaged bench` have in common, as said on the command line."""

    methods: list[Method]
    batch_sizes: list[int]
    models: list[Pair]
    prompts: str | None = None
    num_prompts: int | None = None
    max_tokens: int = 64
    num_speculative_tokens: int = 5
    window: int | None = None
    rounds: int = 3
    threads: int | None = 1
    device: str = "cpu"
    dtype: str = "auto"
    numerics: str = "exact"
    out: Path | None = None

    def as_dict(self) -> dict[str, Any]:
        """The options as a result records them: names, no paths."""
        return {
            "methods": [method.name for method in self.methods],
            "batch_sizes": self.batch_sizes,
            "models": [pair.name for pair in self.models],
            "prompts": "embedded" if self.prompts is None else Path(self.prompts).name,
            "num_prompts": self.num_prompts,
            "max_tokens": self.max_tokens,
            "num_speculative_tokens": self.num_speculative_tokens,
            "window": self.window,
            "rounds": self.rounds,
            "device": self.device,
            "dtype": self.dtype,
            "numerics": self.numerics,
        }

    def workloads(self) -> list[Workload]:
        """One workload for each pair of models.

        Raises:
            ValueError: naming the option, its value and what is allowed, before any model runs.
        """
        check_methods(self.methods, self.batch_sizes, self.window, self.device)
        check_choice("--numerics", self.numerics, NUMERICS)
        check_out(self.out)
        check_device(self.device)
        records = evenly_spread(load_prompts(self.prompts), self.num_prompts)
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        return [self._workload(pair, [record.text for record in records]) for pair in self.models]

    def _workload(self, pair: Pair, texts: Sequence[str]) -> Workload:
        engine_arguments = {"device": self.device, "dtype": self.dtype, "numerics": self.numerics}
        speculative = {"model": pair.draft, "num_speculative_tokens": self.num_speculative_tokens}
        # Shows that both models can be loaded, and how long a prompt may be.
        llm = LLM(pair.target, speculative_config=speculative, max_num_seqs=1, **engine_arguments)
        if llm.tokenizer is None:
            raise ValueError(f"--models: {pair.target!r} has no tokenizer; allowed: a checkpoint with one")
        room = llm.config.max_model_len - self.max_tokens
        if room < 1:
            raise ValueError(f"--max-tokens={self.max_tokens} must be below max_model_len={llm.config.max_model_len}")
        prompts, _ = clip([llm.tokenizer.encode(text, verbose=False) for text in texts], room)
        max_model_len = max(max(map(len, prompts)) + self.max_tokens, self.num_speculative_tokens + 2)
        models = [llm.engine.target.model, llm.engine.draft.model]
        for method in self.methods:
            for batch_size in self.batch_sizes:
                arguments = method.engine_arguments(batch_size, self.window)
                arguments["max_num_batched_tokens"] = max(MAX_NUM_BATCHED_TOKENS, batch_size)
                kv_memory.check(replace(llm.config, max_model_len=max_model_len, **arguments), models)
        return Workload(
            pair,
            prompts,
            SamplingParams(temperature=0.0, max_tokens=self.max_tokens, detokenize=False),
            self.num_speculative_tokens,
            self.window,
            engine_arguments,
            max_model_len,
        )


def check_device(device: str) -> None:
    """Raise ValueError unless `device` is a CPU or a CUDA device that is there."""
    try:
        kind = torch.device(device).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"--device={device!r} is not known; allowed: 'cpu' or 'cuda[:index]'")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device={device!r} is not there: torch sees no CUDA device; allowed here: 'cpu'")


def check_out(out: Path | None) -> None:
    """Raise ValueError unless plots can be drawn and files written into the folder `out`."""
    if out is None:
        return
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("--out: its plots need matplotlib; allowed: pip install specpaged[bench]") from None
    place = out
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise ValueError(f"--out={str(out)!r} cannot be written; allowed: a folder that is yours, or a new one in it")
