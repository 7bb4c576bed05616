"""How drafts are proposed and verified: frozen, validated before any work, no derived state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from specpaged.checks import check_callable, check_choice, check_int, check_names
from specpaged.config import DTYPES, NUMERICS

MAX_ADAPTIVE_DRAFT_TOKENS = 8  # that an adaptive drafter goes deep, where a user names no maximum
HEADS = ("eagle3", "clover")  # methods whose model reads the target's hidden states
WITH_MODEL = ("draft_model", *HEADS)
METHODS = (*WITH_MODEL, "ngram", "suffix", "custom")
SELECTIONS = ("adaptive", "tetris")
VERIFICATIONS = ("greedy", "coupled", "rejection")
DEFAULT_PROMPT_LOOKUP = 5  # as in vLLM
SUFFIX_DECODING = {  # as in vLLM; a share is any number from 0 on, and at most what is said beside it
    "suffix_decoding_max_tree_depth": (24, 1),
    "suffix_decoding_max_cached_requests": (10_000, 0),
    "suffix_decoding_max_spec_factor": (1.0, math.inf),
    "suffix_decoding_min_token_prob": (0.1, 1.0),
}
_METHOD_OF = {  # settings that one method alone has
    "prompt_lookup_min": "ngram",
    "prompt_lookup_max": "ngram",
    **dict.fromkeys(SUFFIX_DECODING, "suffix"),
    "drafter": "custom",
    "drafter_options": "custom",
}
DEFAULT_TETRIS_EXTRA = 2

# K by the number of running sequences, [first, last, K], by device, where a user says nothing and nothing is decided
# while running: under the schedules and rollbacks of studies. The CPU's are measured, on the embedded pair (`make
# bench` sweeps K); the GPU's are not.
DEFAULT_NUM_SPECULATIVE_TOKENS = {
    "cpu": ((1, 3, 5), (4, 128, 2)),
    "cuda": ((1, 32, 5), (33, 128, 3)),
}


@dataclass(frozen=True)
class SpeculativeConfig:
    """How drafts are proposed and verified.

    `method` "draft_model" has a small model, `model`, decode ahead of the target; "eagle3" and "clover" have heads,
    `model`, which were trained on this target and read its hidden states. "ngram" is prompt lookup: no model drafts,
    and the last `prompt_lookup_max` tokens, or fewer, down to `prompt_lookup_min`, are looked for in what came before
    (5 by default; one of them said alone serves for both).
    "suffix" is suffix decoding: no model, either; the longest suffixes, of at most `suffix_decoding_max_tree_depth`
    tokens, are looked for in the sequence's own text and in outputs of `suffix_decoding_max_cached_requests` others,
    and behind m tokens come at most m * `suffix_decoding_max_spec_factor` of those that are counted there as likely as
    `suffix_decoding_min_token_prob`, all together.
    "custom" is a class of somebody's own, `drafter`: "package.module:Class", or in Python the class itself or another
    callable. It is called with a DrafterContext and with `drafter_options` as keyword arguments: see
    specpaged.drafting.custom.
    `numerics` is the draft's own: only the target decides tokens, so a fast draft costs nothing in exactness; nor does
    `kv_cache_dtype`, what its keys and values are stored as ("auto": in the dtype of its arithmetic).
    `num_speculative_tokens` is K at every batch size; with "auto", the default, it is decided in every step, from
    measured cost and acceptance, and is `max_num_speculative_tokens` at most (8 by default).
    `num_speculative_tokens_per_batch_size` holds [first, last, K] ranges of the number of running sequences instead
    (vLLM's form); a batch size in no range gets K = 0. Where none of these is said, `resolved` says it, as `LLM` does.
    `selection` "tetris" is TETRIS as published (S. Wu et al., 2502.15197): `num_speculative_tokens` and
    `tetris_extra_proposals` more (2 by default) are drafted for each of B sequences, and the likeliest of all, B times
    `num_speculative_tokens`, are verified.
    """

    model: str | None = None
    method: str = "draft_model"
    num_speculative_tokens: int | str | None = None
    max_num_speculative_tokens: int | None = None
    num_speculative_tokens_per_batch_size: Sequence[Sequence[int]] | None = None
    numerics: str = "fast"
    kv_cache_dtype: str = "auto"
    verification: str = "coupled"
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    suffix_decoding_max_tree_depth: int | None = None
    suffix_decoding_max_cached_requests: int | None = None
    suffix_decoding_max_spec_factor: float | None = None
    suffix_decoding_min_token_prob: float | None = None
    drafter: str | Callable[..., Any] | None = None
    drafter_options: Mapping[str, Any] | None = None
    selection: str = "adaptive"
    tetris_extra_proposals: int | None = None

    def __post_init__(self) -> None:
        check_choice("speculative_config['method']", self.method, METHODS)
        self._check_method()
        check_choice("speculative_config['numerics']", self.numerics, NUMERICS)
        check_choice("speculative_config['kv_cache_dtype']", self.kv_cache_dtype, DTYPES)
        if self.method not in WITH_MODEL and self.kv_cache_dtype != "auto":
            raise ValueError(
                f"speculative_config['kv_cache_dtype']={self.kv_cache_dtype!r} is for methods with a model; method "
                f"{self.method!r} has no KV"
            )
        check_choice("speculative_config['verification']", self.verification, VERIFICATIONS)
        if self.num_speculative_tokens not in (None, "auto"):
            check_int("speculative_config['num_speculative_tokens']", self.num_speculative_tokens, 0)
        self._check_decisions()
        _check_ranges(
            "speculative_config['num_speculative_tokens_per_batch_size']", self.num_speculative_tokens_per_batch_size
        )

    def _check_decisions(self) -> None:
        check_choice("speculative_config['selection']", self.selection, SELECTIONS)
        most = self.max_num_speculative_tokens
        if most is not None:
            check_int("speculative_config['max_num_speculative_tokens']", most, 0)
            if self._says_k and not self.is_adaptive:
                raise ValueError(
                    f"speculative_config['max_num_speculative_tokens']={most!r} is for num_speculative_tokens='auto' "
                    f"alone; num_speculative_tokens={self.num_speculative_tokens!r}"
                )
        if self.is_adaptive and self.num_speculative_tokens_per_batch_size is not None:
            raise ValueError(
                "speculative_config['num_speculative_tokens_per_batch_size'] fixes K; allowed beside it: "
                "num_speculative_tokens as an int, or none, not 'auto'"
            )
        if self.selection != "tetris":
            if self.tetris_extra_proposals is not None:
                raise ValueError(
                    f"speculative_config['tetris_extra_proposals']={self.tetris_extra_proposals!r} is for selection "
                    f"'tetris' alone; selection={self.selection!r}"
                )
            return
        if isinstance(self.num_speculative_tokens, str | None) or self.num_speculative_tokens_per_batch_size:
            raise ValueError(
                "speculative_config['selection']='tetris' needs num_speculative_tokens as an int; it is "
                f"{self.num_speculative_tokens!r}"
            )
        if self.verification == "rejection":
            raise ValueError(
                "speculative_config['selection']='tetris' changes what rejection sampling draws; allowed beside it: "
                "verification='coupled' or 'greedy'"
            )
        if self.tetris_extra_proposals is None:
            object.__setattr__(self, "tetris_extra_proposals", DEFAULT_TETRIS_EXTRA)
        check_int("speculative_config['tetris_extra_proposals']", self.tetris_extra_proposals, 0)

    def _check_method(self) -> None:
        for name, method in _METHOD_OF.items():
            if method != self.method and getattr(self, name) is not None:
                raise ValueError(
                    f"speculative_config[{name!r}]={getattr(self, name)!r} is for method {method!r} alone; "
                    f"method={self.method!r}"
                )
        if self.method not in WITH_MODEL and self.model is not None:
            raise ValueError(
                f"speculative_config['model']={self.model!r} is for methods {', '.join(map(repr, WITH_MODEL))}; method "
                f"{self.method!r} has none"
            )
        if self.reads_target and self.model is None:
            raise ValueError(
                f"speculative_config['model']=None: method {self.method!r} needs heads that were trained on the "
                "target; allowed: a local path or hub id"
            )
        if self.method == "ngram":
            self._check_prompt_lookup()
        elif self.method == "suffix":
            self._check_suffix_decoding()
        elif self.method == "custom":
            self._check_custom()

    def _check_custom(self) -> None:
        check_callable("speculative_config['drafter']", self.drafter)
        if self.drafter_options is None:
            object.__setattr__(self, "drafter_options", {})
        check_names("speculative_config['drafter_options']", self.drafter_options)

    def _check_suffix_decoding(self) -> None:
        for name, (default, bound) in SUFFIX_DECODING.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
            value = getattr(self, name)
            if isinstance(default, int):
                check_int(f"speculative_config[{name!r}]", value, bound)
            elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= bound:
                allowed = "0 or more" if bound == math.inf else f"0 to {bound:g}"
                raise ValueError(f"speculative_config[{name!r}]={value!r} must be a number; allowed: {allowed}")

    def _check_prompt_lookup(self) -> None:
        names = ("prompt_lookup_min", "prompt_lookup_max")
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
        return self.method in WITH_MODEL and self.max_draft_tokens > 0

    @property
    def reads_target(self) -> bool:
        """Whether drafts come of the target's hidden states: KV of a drafter that reads these is never caught up."""
        return self.method in HEADS

    @classmethod
    def from_mapping(cls, config: Mapping[str, Any]) -> SpeculativeConfig:
        """The configuration from a dict as vLLM spells it; unknown keys are refused by name."""
        known = [f.name for f in fields(cls)]
        for key in config:
            if key not in known:
                raise ValueError(f"speculative_config has no key {key!r}; allowed: {', '.join(known)}")
        return cls(**config)

    def resolved(self, device: str = "cpu", is_for_studies: bool = False) -> SpeculativeConfig:
        """The configuration with K said: decided in every step, or for studies by batch size, on a device such as "cpu"
        or "cuda:1".
        """
        if self._says_k:
            return self
        if not is_for_studies:
            return replace(self, num_speculative_tokens="auto")
        kind = "cuda" if str(device).startswith("cuda") else "cpu"
        return replace(self, num_speculative_tokens_per_batch_size=DEFAULT_NUM_SPECULATIVE_TOKENS[kind])

    @property
    def is_adaptive(self) -> bool:
        """Whether K is decided in every step."""
        return self.num_speculative_tokens == "auto"

    @property
    def decides(self) -> bool:
        """Whether it is decided while running what is drafted or verified."""
        return self.is_adaptive or self.selection == "tetris"

    @property
    def _says_k(self) -> bool:
        return self.num_speculative_tokens is not None or self.num_speculative_tokens_per_batch_size is not None

    def _check_says_k(self) -> None:
        if not self._says_k:
            raise ValueError("speculative_config says no K: use SpeculativeConfig.resolved(), as LLM does")

    def num_draft_tokens(self, batch_size: int) -> int:
        """K for a step of `batch_size` running sequences: the largest one, where it is decided in every step.

        ValueError if the configuration is not resolved.
        """
        self._check_says_k()
        if self.is_adaptive or self.selection == "tetris":
            return self.max_draft_tokens
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
        if self.is_adaptive:
            most = self.max_num_speculative_tokens
            return MAX_ADAPTIVE_DRAFT_TOKENS if most is None else most
        if self.num_speculative_tokens_per_batch_size is None:
            return self.num_speculative_tokens + (self.tetris_extra_proposals or 0)
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
