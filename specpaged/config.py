"""What an engine is built from: frozen, validated before any work, no derived state."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specpaged.checks import check_bool, check_choice, check_int, check_use

if TYPE_CHECKING:
    from specpaged.speculative_config import SpeculativeConfig

NUMERICS = ("exact", "fast")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DRAFT_KV_DTYPES = (*DTYPES, "fp8_e4m3")  # of keys and values that decide nothing; vLLM's name for 8 bits
ATTENTION_BACKENDS = ("auto", "torch", "cpp", "triton", "xformers")
MODEL_IMPLS = ("auto", "flat", "transformers")
SCHEDULES = ("continuous", "eqspec", "exspec")
BY_HALVES = ("overlap", "auto")  # schedules, too, of batches that may go by halves
SERVING = ("continuous", *BY_HALVES)  # the schedules that are not for studies
ROLLBACKS = ("truncate", "repad", "gather", "compact", "group", "batch_min")
MIN_WINDOW = 48  # of EXSPEC by default, as in the paper (arXiv 2510.22876)

ASSETS = Path(__file__).parent / "assets"
EMBEDDED_TARGET = str(ASSETS / "target")
EMBEDDED_DRAFT = str(ASSETS / "draft")


@dataclass(frozen=True)
class EngineConfig:
    """Everything an engine needs beside the models. Sizes are in tokens, memory is in bytes.

    `kv_cache_dtype` is what the target's keys and values are stored as: "auto" in the dtype of its arithmetic; where a
    narrower one rounds them, plain decoding reads the same rounded ones, and outputs stay exact. The draft's is in
    `speculative_config`. `kv_cache_memory_bytes` None takes what `max_num_seqs` full-length sequences need, at most
    1 GiB on a CPU and 80 % of what is free on a GPU. `max_model_len` None takes the target's max_position_embeddings;
    where `kv_cache_memory_bytes` is None, too, no more than that memory holds of one sequence.

    `attention_backend` serves both models; "auto" is what the environment variable SPECPAGED_ATTENTION_BACKEND says, or
    else Triton's kernels on a GPU and C++ ones on a CPU, and torch where those cannot be had. `model_impl` serves both
    models, too: "auto" is the flat decoder for the families that it covers, and else the model's own modules in
    transformers. On a GPU the flat decoder's passes are captured as CUDA graphs unless `enforce_eager`. Unless told
    otherwise, `LLM(device="cuda")` takes blocks of 64 tokens.

    One step of the engine runs up to `num_scheduler_steps` rounds where nothing is to be decided between them, which
    are then one call into the C++ kernels: all who run decode greedily, and the drafter is a model or a lookup. Of more
    than four rounds no more than take some 25 ms: until they are over, nobody is let in or answered.

    With `device_round` a round runs on the device from its drafts to its tokens, without asking the host, who is one
    round late: he reads a round while the next one runs, or with `synchronous` before he launches the next. It is off
    by default: on CPUs there is nothing to gain, and on GPUs it has not been measured yet. It needs the flat decoder on
    Triton's kernels. What it does not cover (prefill, lookups, heads, rejection sampling, log-probabilities and logits
    that more than a temperature is done to) is the host's, as ever. Outputs are the same in every way.

    `schedule` says who takes part in a step; what comes out of a request is the same with all of them. "continuous":
    whoever can run, with drafts made behind the target's pass. "overlap" (MineDraft, arXiv 2603.18016): one half of the
    batch, while drafts are made for the other one, on two groups of cores, or two streams of a GPU. "auto": the same
    where it has been measured to be faster, else "continuous". The others, and `rollback`, are for studies. "eqspec"
    runs fixed batches to their end; "exspec" holds a `window` of sequences (default: 48, or half as many again as
    max_num_seqs) and runs batches of equal length out of it, else its oldest (if `sort_by_length`, its shortest).
    `rollback` other than "truncate" keeps KV in dense, left-padded batches: see specpaged.research.
    """

    model: str = EMBEDDED_TARGET
    speculative_config: SpeculativeConfig | None = None
    dtype: str = "auto"
    device: str = "cpu"
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    kv_cache_memory_bytes: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = False
    numerics: str = "exact"
    attention_backend: str = "auto"
    model_impl: str = "auto"
    enforce_eager: bool = False
    num_scheduler_steps: int = 16
    device_round: bool = False
    synchronous: bool = False
    schedule: str = "continuous"
    window: int | None = None
    sort_by_length: bool = False
    rollback: str = "truncate"
    seed: int = 0
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        check_choice("numerics", self.numerics, NUMERICS)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("kv_cache_dtype", self.kv_cache_dtype, DTYPES)
        check_choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        check_choice("model_impl", self.model_impl, MODEL_IMPLS)
        check_int("block_size", self.block_size, 1)
        check_int("max_num_seqs", self.max_num_seqs, 1)
        check_int("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        check_int("num_scheduler_steps", self.num_scheduler_steps, 1)
        check_int("seed", self.seed, 0)
        check_bool("enable_prefix_caching", self.enable_prefix_caching)
        check_bool("enforce_eager", self.enforce_eager)
        check_bool("trust_remote_code", self.trust_remote_code)
        check_bool("device_round", self.device_round)
        check_bool("synchronous", self.synchronous)
        if self.synchronous and not self.device_round:
            raise ValueError("synchronous=True is for device_round=True alone; device_round=False")
        if self.max_model_len is not None:
            check_int("max_model_len", self.max_model_len, 2)
        if self.kv_cache_memory_bytes is not None:
            check_int("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1)
        self._check_schedule_and_rollback()
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

    @property
    def rounds_per_step(self) -> int:
        """At most: others than this schedule and rollback have something to do behind every round."""
        return 1 if self._is_for_studies else self.num_scheduler_steps

    @property
    def _is_for_studies(self) -> bool:
        return is_for_studies(self.schedule, self.rollback)

    def _check_schedule_and_rollback(self) -> None:
        check_choice("schedule", self.schedule, (*SCHEDULES, *BY_HALVES))
        check_choice("rollback", self.rollback, ROLLBACKS)
        check_bool("sort_by_length", self.sort_by_length)
        self._check_halves()
        speculative = self.speculative_config if self._is_for_studies else None
        serving = f"schedule={', '.join(map(repr, SERVING))} and rollback='truncate' alone"
        studied = f"schedule={self.schedule!r}, rollback={self.rollback!r}"
        if speculative is not None and speculative.decides:
            name = "selection" if speculative.selection == "tetris" else "num_speculative_tokens"
            raise ValueError(f"speculative_config[{name!r}]={getattr(speculative, name)!r} is for {serving}; {studied}")
        for name in ("kv_cache_memory_bytes", "kv_window") if speculative is not None else ():
            check_use(f"speculative_config[{name!r}]", getattr(speculative, name), False, f"{serving}; {studied}")
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

    def _check_halves(self) -> None:
        if self.schedule not in BY_HALVES:
            return
        if self.rollback != "truncate":
            raise ValueError(
                f"schedule={self.schedule!r} changes page tables between two passes alone; rollback={self.rollback!r} "
                "moves KV of the whole batch; allowed beside it: rollback='truncate'"
            )
        if self.device_round:
            raise ValueError(
                f"device_round=True leaves drafts and verification to one call of the device, and schedule="
                f"{self.schedule!r} runs one beside the other; allowed: one of the two"
            )
        if self.schedule == "overlap" and self.speculative_config is None:
            raise ValueError("schedule='overlap' hides drafting, and nobody drafts: speculative_config=None")


def is_for_studies(schedule: str, rollback: str) -> bool:
    """Whether these are there to be compared, and not to serve with."""
    return schedule not in SERVING or rollback != "truncate"


def _interprets_triton() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
