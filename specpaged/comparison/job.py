"""A run of the command line: prompts, ready to decode in one way after another."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from specpaged.comparison.draft_flags import DraftFlags
from specpaged.llm import LLM
from specpaged.outputs import RequestOutput
from specpaged.prompts import PromptRecord, clip, evenly_spread, is_unicode, load_prompts
from specpaged.sampling_params import SamplingParams


@dataclass(frozen=True)
class Run:
    """The first completion of every prompt by one way of decoding, and the wall time that it took, prefill included."""

    label: str
    token_ids: list[list[int]]
    seconds: float
    outputs: Sequence[RequestOutput] = ()  # of an engine's run

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens by wall time."""
        return sum(map(len, self.token_ids)) / self.seconds


def _is_writable(path: Path) -> bool:
    """Whether a file can be written there, over another or anew."""
    place = path if path.exists() else path.absolute().parent
    return not path.is_dir() and place.exists() and os.access(place, os.W_OK)


def _records(prompts: str | None, texts: Sequence[str] | None) -> list[PromptRecord]:
    """Prompts given as arguments, with the ids 1, 2, ...; else those of a file, else the sample prompts."""
    if not texts:
        return load_prompts(prompts)
    if prompts is not None:
        raise ValueError(
            f"prompts are given both as arguments, PROMPT, and by --prompts={prompts!r}; allowed: one of the two"
        )
    for text in texts:
        if not text or not is_unicode(text):
            raise ValueError(f"PROMPT={text!r} is empty or not UTF-8; allowed: text of at least one character")
    return [PromptRecord(number, "", text) for number, text in enumerate(texts, start=1)]


@dataclass(frozen=True)
class Job:
    """An LLM, the prompts' token ids, and one SamplingParams each."""

    llm: LLM
    records: list[PromptRecord]
    token_ids: list[list[int]]
    params: list[SamplingParams]
    num_clipped: int
    lacks_draft: bool  # the method wants a draft model, and none is given for this target

    @classmethod
    def prepare(
        cls,
        *,
        model: str | None,
        draft_model: str | None,
        method: str | None,
        prompts: str | None,
        num_prompts: int | None,
        max_prompt_tokens: int | None,
        num_speculative_tokens: int | None,
        max_tokens: int,
        temperature: float,
        seed: int | None,
        threads: int | None,
        output: Path | None,
        draft_kv_cache_dtype: str = "auto",
        draft_kv_cache_memory_bytes: int | None = None,
        draft_kv_window: int | None = None,
        block_size: int | None = None,
        max_num_batched_tokens: int | None = None,
        drafter: str | None = None,
        speculative_config: str | None = None,
        measures_k: bool = False,
        texts: Sequence[str] | None = None,
        **engine_arguments: Any,
    ) -> Job:
        """What the flags ask for, checked before any work. `texts` are prompts given as arguments; what is said of
        drafts is DraftFlags'.

        A model without a draft decodes plainly, unless the method needs none.

        Raises:
            ValueError: naming the flag, its value and what is allowed.
        """
        flags = DraftFlags(
            method,
            draft_model,
            drafter,
            num_speculative_tokens,
            draft_kv_cache_dtype,
            draft_kv_cache_memory_bytes,
            draft_kv_window,
            speculative_config,
        )
        speculative = flags.mapping(model, measures_k)
        sizes = {"block_size": block_size, "max_num_batched_tokens": max_num_batched_tokens}
        engine_arguments |= {name: size for name, size in sizes.items() if size is not None}
        records = evenly_spread(_records(prompts, texts), num_prompts)
        if output is not None and not _is_writable(output):
            raise ValueError(
                f"--output={str(output)!r} cannot be written; allowed: a file in a directory that exists and is yours"
            )
        base = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
        params = [base if seed is None else replace(base, seed=(seed + i) % 2**64) for i in range(len(records))]
        if threads is not None:
            torch.set_num_threads(threads)
        llm = LLM(model, speculative_config=speculative, **engine_arguments)
        room = llm.config.max_model_len - max_tokens
        if room < 1:
            raise ValueError(f"--max-tokens={max_tokens} must be below max_model_len={llm.config.max_model_len}")
        if llm.tokenizer is None:
            raise ValueError(
                f"--model={model!r} has no tokenizer; allowed: a checkpoint with one, to read text prompts"
            )
        whole = [llm.tokenizer.encode(record.text, verbose=False) for record in records]
        token_ids, num_clipped = clip(whole, min(max_prompt_tokens or room, room))
        return cls(llm, records, token_ids, params, num_clipped, lacks_draft=speculative is None)

    @property
    def label(self) -> str:
        """How the batch is decoded."""
        batch = f"batch of {self.llm.config.max_num_seqs}"
        if not self.llm.engine.max_draft_tokens:
            return f"plain, {batch}"
        speculative = self.llm.config.speculative_config
        k = f"= {speculative.num_speculative_tokens}"
        if speculative.is_adaptive:
            k = "as decided in every step"
        elif speculative.num_speculative_tokens_per_batch_size is not None:
            k = "by batch size"
        return f"speculative, {batch}, K {k}"

    def run(self, label: str, params: Sequence[SamplingParams] | None = None) -> Run:
        """Decode the prompts in batches, with a progress bar."""
        prompts = [{"prompt_token_ids": ids} for ids in self.token_ids]
        gc.collect()  # all that is loaded: a quarter of a second, which would fall into some run's time
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, params or self.params)
        seconds = time.perf_counter() - start
        token_ids = [output.outputs[0].token_ids if output.outputs else [] for output in outputs]
        return Run(label, token_ids, seconds, outputs)
