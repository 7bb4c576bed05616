"""How drafts are proposed and verified: frozen, validated before any work, no derived state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from specpaged.checks import check_callable, check_choice, check_int, check_names, check_ranges, check_share, check_use
from specpaged.config import DRAFT_KV_DTYPES, NUMERICS

MAX_ADAPTIVE_DRAFT_TOKENS = 8  # that an adaptive drafter goes deep, where a user names no maximum
HEADS = ("eagle3", "clover")  # methods whose model reads the target's hidden states
WITH_MODEL = ("draft_model", *HEADS)
LOOKUPS = ("ngram", "suffix")  # methods without one
MIN_KV_WINDOW = 64  # tokens: a draft that reads less of a text has little to go by, and begins it anew too often
METHODS = (*WITH_MODEL, *LOOKUPS, "custom")
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

# K by running sequences, [first, last, K], in studies whose user says nothing: measured on a CPU (`make bench`) alone.
DEFAULT_NUM_SPECULATIVE_TOKENS = {"cpu": ((1, 3, 5), (4, 128, 2)), "cuda": ((1, 32, 5), (33, 128, 3))}


@dataclass(frozen=True)
class SpeculativeConfig:
    """How drafts are proposed and verified.

    `method` "draft_model" has a small model, `model`, decode ahead of the target; "eagle3" and "clover" have heads,
    `model`, which were trained on this target and read its hidden states. "ngram" is prompt lookup: no model drafts,
    and the last `prompt_lookup_max` tokens, or fewer, down to `prompt_lookup_min`, are looked for in what came before
    (5 by default; one of them said alone serves for both). "suffix" is suffix decoding: no model, either; the longest
    suffixes, of at most `suffix_decoding_max_tree_depth` tokens, are looked for in the sequence's own text and in
    outputs of `suffix_decoding_max_cached_requests` others, and behind m tokens come at most m *
    `suffix_decoding_max_spec_factor` of those that are counted there as likely as `suffix_decoding_min_token_prob`, all
    together. "custom" is a class of somebody's own, `drafter`: "package.module:Class", or in Python a callable. It is
    called with a DrafterContext and with `drafter_options` as keyword arguments: see specpaged.drafting.custom.
    Several methods, in a list, draft together: any lookups, and one method with a model at most. In every round each
    sequence takes what promises most: of K that is decided while running, by what each drafter's drafts have come to;
    else a lookup's draft if half as many of its tokens are likely to stand as a model would draft.
    `numerics` is the draft's own: only the target decides tokens, so a fast draft costs nothing in exactness; nor does
    `kv_cache_dtype`, what its keys and values are stored as ("auto": in the dtype of its arithmetic). A draft model may
    have a KV pool of its own, `kv_cache_memory_bytes` out of the engine's: who finds no room in it decodes plainly. A
    `kv_window` of so many tokens, the first four of a sequence and its last ones, is all of it that the draft reads. It
    may be on another `device`, such as "cuda:1": with schedule="overlap", beside the target's passes.
    `num_speculative_tokens` is K at every batch size; with "auto", the default, it is decided in every step, from
    measured cost and acceptance, and is `max_num_speculative_tokens` at most (8 by default).
    `num_speculative_tokens_per_batch_size` holds [first, last, K] ranges of the number of running sequences instead
    (vLLM's form); a batch size in no range gets K = 0. Where none of these is said, `resolved` says it, as `LLM` does.
    `selection` "tetris" is TETRIS as published (S. Wu et al., 2502.15197): `num_speculative_tokens` and
    `tetris_extra_proposals` more (2 by default) are drafted for each of B sequences, and the likeliest of all, B times
    `num_speculative_tokens`, are verified.
    """

    model: str | None = None
    method: str | Sequence[str] = "draft_model"
    num_speculative_tokens: int | str | None = None
    max_num_speculative_tokens: int | None = None
    num_speculative_tokens_per_batch_size: Sequence[Sequence[int]] | None = None
    numerics: str = "fast"
    kv_cache_dtype: str = "auto"
    kv_cache_memory_bytes: int | None = None
    kv_window: int | None = None
    device: str | None = None
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
        self._check_method()
        self._check_settings()
        check_choice("speculative_config['numerics']", self.numerics, NUMERICS)
        check_choice("speculative_config['kv_cache_dtype']", self.kv_cache_dtype, DRAFT_KV_DTYPES)
        with_kv = f"methods with a model; method {self.method!r} has no KV"
        has_kv = self.model_method is not None or self.kv_cache_dtype == "auto"
        check_use("speculative_config['kv_cache_dtype']", self.kv_cache_dtype, has_kv, with_kv)
        for name, least in (("device", None), ("kv_cache_memory_bytes", 1), ("kv_window", MIN_KV_WINDOW)):
            value, drafts_alone = getattr(self, name), f"method 'draft_model' alone; method={self.method!r}"
            check_use(f"speculative_config[{name!r}]", value, self.method == "draft_model", drafts_alone)
            if value is not None and least is not None:
                check_int(f"speculative_config[{name!r}]", value, least)
        check_choice("speculative_config['verification']", self.verification, VERIFICATIONS)
        if self.num_speculative_tokens not in (None, "auto"):
            check_int("speculative_config['num_speculative_tokens']", self.num_speculative_tokens, 0)
        self._check_decisions()
        check_ranges(
            "speculative_config['num_speculative_tokens_per_batch_size']", self.num_speculative_tokens_per_batch_size
        )

    def _check_method(self) -> None:
        name, methods = "speculative_config['method']", self.method
        if isinstance(methods, str) or not isinstance(methods, Sequence):
            check_choice(name, methods, METHODS)
            return
        for i, method in enumerate(methods):
            check_choice(f"{name}[{i}]", method, METHODS if len(methods) == 1 else (*WITH_MODEL, *LOOKUPS))
        if not methods or len(set(methods)) < len(methods) or sum(method in WITH_MODEL for method in methods) > 1:
            raise ValueError(
                f"{name}={list(methods)!r} must name at least one method, each once, and at most one of those with a "
                f"model: {', '.join(map(repr, WITH_MODEL))}"
            )
        object.__setattr__(self, "method", methods[0] if len(methods) == 1 else tuple(methods))

    def _check_decisions(self) -> None:
        check_choice("speculative_config['selection']", self.selection, SELECTIONS)
        most = self.max_num_speculative_tokens
        if most is not None:
            check_int("speculative_config['max_num_speculative_tokens']", most, 0)
            auto = f"num_speculative_tokens='auto' alone; num_speculative_tokens={self.num_speculative_tokens!r}"
            check_use(
                "speculative_config['max_num_speculative_tokens']", most, self.is_adaptive or not self._says_k, auto
            )
        if self.is_adaptive and self.num_speculative_tokens_per_batch_size is not None:
            raise ValueError(
                "speculative_config['num_speculative_tokens_per_batch_size'] fixes K; allowed beside it: "
                "num_speculative_tokens as an int, or none, not 'auto'"
            )
        if self.selection != "tetris":
            alone = f"selection 'tetris' alone; selection={self.selection!r}"
            check_use("speculative_config['tetris_extra_proposals']", self.tetris_extra_proposals, False, alone)
            return
        if isinstance(self.num_speculative_tokens, str | None) or self.num_speculative_tokens_per_batch_size:
            raise ValueError(
                "speculative_config['selection']='tetris' needs num_speculative_tokens as an int; it is "
                f"{self.num_speculative_tokens!r}"
            )
        if len(self.methods) > 1:
            raise ValueError(
                "speculative_config['selection']='tetris' is for one method; allowed beside it: a method, not "
                f"{list(self.methods)!r}"
            )
        if self.verification == "rejection":
            raise ValueError(
                "speculative_config['selection']='tetris' changes what rejection sampling draws; allowed beside it: "
                "verification='coupled' or 'greedy'"
            )
        if self.tetris_extra_proposals is None:
            object.__setattr__(self, "tetris_extra_proposals", DEFAULT_TETRIS_EXTRA)
        check_int("speculative_config['tetris_extra_proposals']", self.tetris_extra_proposals, 0)

    def _check_settings(self) -> None:
        for name, method in _METHOD_OF.items():
            alone = f"method {method!r} alone; method={self.method!r}"
            check_use(f"speculative_config[{name!r}]", getattr(self, name), method in self.methods, alone)
        with_model = f"methods {', '.join(map(repr, WITH_MODEL))}; method {self.method!r} has none"
        check_use("speculative_config['model']", self.model, self.model_method is not None, with_model)
        if self.reads_target and self.model is None:
            raise ValueError(
                f"speculative_config['model']=None: method {self.model_method!r} needs heads that were trained on the "
                "target; allowed: a local path or hub id"
            )
        if "ngram" in self.methods:
            self._check_prompt_lookup()
        if "suffix" in self.methods:
            self._check_suffix_decoding()
        if self.method == "custom":
            self._check_custom()

    def _check_custom(self) -> None:
        check_callable("speculative_config['drafter']", self.drafter)
        options = {} if self.drafter_options is None else self.drafter_options
        check_names("speculative_config['drafter_options']", options)
        object.__setattr__(self, "drafter_options", options)

    def _check_suffix_decoding(self) -> None:
        for name, (default, bound) in SUFFIX_DECODING.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
            value = getattr(self, name)
            if isinstance(default, int):
                check_int(f"speculative_config[{name!r}]", value, bound)
            else:
                check_share(f"speculative_config[{name!r}]", value, bound)

    def _check_prompt_lookup(self) -> None:
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        for name, value, other in zip(
            ("prompt_lookup_min", "prompt_lookup_max"), (low, high), (high, low), strict=True
        ):
            if value is None:
                object.__setattr__(self, name, DEFAULT_PROMPT_LOOKUP if other is None else other)
            check_int(f"speculative_config[{name!r}]", getattr(self, name), 1)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"speculative_config['prompt_lookup_min']={self.prompt_lookup_min} must be at most "
                f"prompt_lookup_max={self.prompt_lookup_max}"
            )

    @property
    def methods(self) -> tuple[str, ...]:
        """All that draft together, in the order that was given."""
        return (self.method,) if isinstance(self.method, str) else tuple(self.method)

    @property
    def lookups(self) -> tuple[str, ...]:
        """Of these the ones without a model."""
        return tuple(method for method in self.methods if method in LOOKUPS)

    @property
    def model_method(self) -> str | None:
        """Of these the one with a model, if any."""
        return next((method for method in self.methods if method in WITH_MODEL), None)

    @property
    def has_model(self) -> bool:
        """Whether a model drafts, at some batch size. ValueError if the configuration is not resolved."""
        return self.model_method is not None and self.max_draft_tokens > 0

    @property
    def reads_target(self) -> bool:
        """Whether drafts come of the target's hidden states: KV of a drafter that reads these is never caught up."""
        return self.model_method in HEADS

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
