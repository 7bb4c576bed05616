"""What an engine is built from: frozen, validated before any work, no derived state."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

NUMERICS = ("exact", "fast")
DTYPES = ("auto", "float32", "bfloat16", "float16")
METHODS = ("draft_model", "ngram")
DEFAULT_PROMPT_LOOKUP = 5  # as in vLLM
ATTENTION_BACKENDS = ("auto", "torch", "cpp", "triton", "xformers")
MODEL_IMPLS = ("auto", "flat", "transformers")
VERIFICATIONS = ("greedy", "coupled", "rejection")
SCHEDULES = ("continuous", "eqspec", "exspec")
ROLLBACKS = ("truncate", "repad", "gather", "compact", "group", "batch_min")
MIN_WINDOW = 48  # of EXSPEC by default, as in the paper (arXiv 2510.22876)

ASSETS = Path(__file__).parent / "assets"
EMBEDDED_TARGET = str(ASSETS / "target")
EMBEDDED_DRAFT = str(ASSETS / "draft")

# K by the number of running sequences, [first, last, K], where a user says nothing, by device. A verify pass that is
# bound by the weights' bytes costs what a plain step costs; one that is bound by arithmetic costs more with each row.
# On a CPU that begins at some 10 rows, on a GPU at some hundreds. The CPU's are measured, on the embedded pair (`make
# bench` sweeps K); the GPU's are not.
DEFAULT_NUM_SPECULATIVE_TOKENS = {
    "cpu": ((1, 3, 5), (4, 128, 2)),
    "cuda": ((1, 32, 5), (33, 128, 3)),
}


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not known; allowed: {', '.join(map(repr, allowed))}")


def check_int(name: str, value: Any, minimum: int) -> None:
    """Raise ValueError unless `value` is an int (no bool) of at least `minimum`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{name}={value!r} must be an int >= {minimum}")


def check_bool(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is True or False: a string would count as true."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False")


@dataclass(frozen=True)
class SpeculativeConfig:
    """How drafts are proposed and verified.

    `method` "ngram" is prompt lookup: no model drafts, and the last `prompt_lookup_max` tokens, or fewer, down to
    `prompt_lookup_min`, are looked for in what came before (5 by default; one of them said alone serves for both).
    `numerics` is the draft's own: only the target decides tokens, so a fast draft costs nothing in exactness.
    `num_speculative_tokens` is K at every batch size. `num_speculative_tokens_per_batch_size` holds [first, last, K]
    ranges of the number of running sequences instead (vLLM's form); a batch size in no range gets K = 0. With neither,
    `resolved` puts in the ranges of DEFAULT_NUM_SPECULATIVE_TOKENS for a device, as `LLM` does.
    """

    model: str | None = None
    method: str = "draft_model"
    num_speculative_tokens: int | None = None
    num_speculative_tokens_per_batch_size: Sequence[Sequence[int]] | None = None
    numerics: str = "fast"
    verification: str = "coupled"
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None

    def __post_init__(self) -> None:
        check_choice("speculative_config['method']", self.method, METHODS)
        self._check_prompt_lookup()
        check_choice("speculative_config['numerics']", self.numerics, NUMERICS)
        check_choice("speculative_config['verification']", self.verification, VERIFICATIONS)
        if self.num_speculative_tokens is not None:
            check_int("speculative_config['num_speculative_tokens']", self.num_speculative_tokens, 0)
        _check_ranges(
            "speculative_config['num_speculative_tokens_per_batch_size']", self.num_speculative_tokens_per_batch_size
        )

    def _check_prompt_lookup(self) -> None:
        names = ("prompt_lookup_min", "prompt_lookup_max")
        if self.method != "ngram":
            for name in names:
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"speculative_config[{name!r}]={getattr(self, name)!r} is for method 'ngram' alone; "
                        f"method={self.method!r}"
                    )
            return
        if self.model is not None:
            raise ValueError(
                f"speculative_config['model']={self.model!r} is for method 'draft_model'; method 'ngram' has none"
            )
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        for name, value, other in zip(names, (low, high), (high, low), strict=True):
            if value is None:
                object.__setattr__(self, name, DEFAULT_PROMPT_LOOKUP if other is None else other)
            check_int(f"speculative_config[{name!r}]", getattr(self, name), 1)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"speculative_config['prompt_lookup_min']={self.prompt_lookup_min} must be at most "
                f"prompt_lookup_max={self.prompt_lookup_max}"
            )

    @property
    def has_model(self) -> bool:
        """Whether a model drafts, at some batch size. ValueError if the configuration is not resolved."""
        return self.method == "draft_model" and self.max_draft_tokens > 0

    @classmethod
    def from_mapping(cls, config: Mapping[str, Any]) -> SpeculativeConfig:
        """The configuration from a dict as vLLM spells it; unknown keys are refused by name."""
        known = [f.name for f in fields(cls)]
        for key in config:
            if key not in known:
                raise ValueError(f"speculative_config has no key {key!r}; allowed: {', '.join(known)}")
        return cls(**config)

    def resolved(self, device: str) -> SpeculativeConfig:
        """The configuration with K said for every batch size, on a device such as "cpu" or "cuda:1"."""
        if self._says_k:
            return self
        kind = "cuda" if str(device).startswith("cuda") else "cpu"
        return replace(self, num_speculative_tokens_per_batch_size=DEFAULT_NUM_SPECULATIVE_TOKENS[kind])

    @property
    def _says_k(self) -> bool:
        return self.num_speculative_tokens is not None or self.num_speculative_tokens_per_batch_size is not None

    def _check_says_k(self) -> None:
        if not self._says_k:
            raise ValueError("speculative_config says no K: use SpeculativeConfig.resolved(device), as LLM does")

    def num_draft_tokens(self, batch_size: int) -> int:
        """K for a step of `batch_size` running sequences. ValueError if the configuration is not resolved."""
        self._check_says_k()
        if self.num_speculative_tokens_per_batch_size is None:
            return self.num_speculative_tokens
        for first, last, k in self.num_speculative_tokens_per_batch_size:
            if first <= batch_size <= last:
                return k
        return 0

    @property
    def max_draft_tokens(self) -> int:
        """The largest K that any batch size can ask for. ValueError if the configuration is not resolved."""
        self._check_says_k()
        if self.num_speculative_tokens_per_batch_size is None:
            return self.num_speculative_tokens
        return max((k for _, _, k in self.num_speculative_tokens_per_batch_size), default=0)


def _check_ranges(name: str, ranges: Any) -> None:
    """Raise ValueError unless `ranges` is None or ascending [first, last, K] triples that do not overlap."""
    if ranges is None:
        return
    if not isinstance(ranges, Sequence) or isinstance(ranges, str | bytes):
        raise ValueError(f"{name}={ranges!r} must be a list of [first, last, K]")
    last_seen = 0
    for entry in ranges:
        triple = isinstance(entry, Sequence) and len(entry) == 3
        if not triple or not all(isinstance(x, int) and not isinstance(x, bool) for x in entry):
            raise ValueError(f"{name} entry {entry!r} must be three ints [first, last, K]")
        first, last, k = entry
        if not (last_seen < first <= last and k >= 0):
            raise ValueError(
                f"{name} entry {entry!r} must satisfy {last_seen} < first <= last and K >= 0 "
                "(ranges ascend and do not overlap)"
            )
        last_seen = last


@dataclass(frozen=True)
class EngineConfig:
    """Everything an engine needs beside the models. Sizes are in tokens, memory is in bytes.

    `kv_cache_memory_bytes` None takes what `max_num_seqs` full-length sequences need, at most 1 GiB on a CPU and
    80 % of what is free on a GPU. `max_model_len` None takes the target's max_position_embeddings; where
    `kv_cache_memory_bytes` is None, too, no more than that memory holds of one sequence. `attention_backend` serves
    both models; "auto" is Triton's kernels on a GPU and C++ ones on a CPU, and torch where those cannot be had, and the
    environment variable SPECPAGED_ATTENTION_BACKEND overrides it. `model_impl` serves both models, too: "auto" is the
    flat decoder for the families that it covers, and else the model's own modules in transformers. On a GPU the flat
    decoder's passes are captured as CUDA graphs unless `enforce_eager`. Unless told otherwise, `LLM(device="cuda")`
    takes blocks of 64 tokens.

    `schedule` and `rollback` are for studies; what comes out of a request is the same with all of them. `schedule`:
    "eqspec" runs fixed batches to their end; "exspec" holds a `window` of sequences (default: 48, or half as many again
    as max_num_seqs) and runs batches of equal length out of it, else its oldest (if `sort_by_length`, its shortest).
    `rollback` other than "truncate" keeps KV in dense, left-padded batches: see specpaged.research.
    """

    model: str = EMBEDDED_TARGET
    speculative_config: SpeculativeConfig | None = None
    dtype: str = "auto"
    device: str = "cpu"
    block_size: int = 16
    kv_cache_memory_bytes: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = False
    numerics: str = "exact"
    attention_backend: str = "auto"
    model_impl: str = "auto"
    enforce_eager: bool = False
    schedule: str = "continuous"
    window: int | None = None
    sort_by_length: bool = False
    rollback: str = "truncate"
    seed: int = 0
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        check_choice("numerics", self.numerics, NUMERICS)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        check_choice("model_impl", self.model_impl, MODEL_IMPLS)
        check_int("block_size", self.block_size, 1)
        check_int("max_num_seqs", self.max_num_seqs, 1)
        check_int("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        check_int("seed", self.seed, 0)
        check_bool("enable_prefix_caching", self.enable_prefix_caching)
        check_bool("enforce_eager", self.enforce_eager)
        check_bool("trust_remote_code", self.trust_remote_code)
        if self.max_model_len is not None:
            check_int("max_model_len", self.max_model_len, 2)
        if self.kv_cache_memory_bytes is not None:
            check_int("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1)
        self._check_arm()
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least "
                f"max_num_seqs={self.max_num_seqs}: every running sequence runs a token in every step"
            )

    @property
    def num_residents(self) -> int:
        """Sequences that may hold KV at once: those that run, or wait in EXSPEC's window."""
        if self.schedule != "exspec":
            return self.max_num_seqs
        return self.window or max(MIN_WINDOW, self.max_num_seqs * 3 // 2)

    def _check_arm(self) -> None:
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("rollback", self.rollback, ROLLBACKS)
        check_bool("sort_by_length", self.sort_by_length)
        if self.schedule != "exspec":
            for name in ("window", "sort_by_length"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name}={getattr(self, name)!r} is for schedule='exspec' alone; schedule={self.schedule!r}"
                    )
        elif self.window is not None:
            check_int("window", self.window, 1)
            if self.window < self.max_num_seqs:
                raise ValueError(
                    f"window={self.window} must be at least max_num_seqs={self.max_num_seqs}: batches come out of it"
                )
        if self.rollback == "truncate":
            return
        if self.schedule == "exspec" and self.rollback != "group":
            raise ValueError(
                f"rollback={self.rollback!r} keeps one batch together, and schedule='exspec' makes up another one in "
                "every round; allowed: rollback='truncate' or 'group', or another schedule"
            )
        if self.enable_prefix_caching:
            raise ValueError(f"enable_prefix_caching=True needs pages; rollback={self.rollback!r} has none")
        if self.attention_backend == "xformers":
            raise ValueError(f"attention_backend='xformers' reads pages alone; rollback={self.rollback!r} has none")
        if self.rollback == "compact" and not self.device.startswith("cuda") and not _interprets_triton():
            raise ValueError(
                f"rollback='compact' is a Triton kernel and needs a GPU; device={self.device!r} (Triton's interpreter, "
                f"TRITON_INTERPRET=1, is for tests); allowed here: {', '.join(r for r in ROLLBACKS if r != 'compact')}"
            )


def _interprets_triton() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
