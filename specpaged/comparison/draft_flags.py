"""What a command line says of drafts: by flags, and by --speculative-config, which knows more."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specpaged.checks import check_callable, check_choice, check_use
from specpaged.speculative_config import HEADS, METHODS, WITH_MODEL, SpeculativeConfig

_EXAMPLE = '{"method": "suffix", "suffix_decoding_max_spec_factor": 2.0}'
# What says how much is drafted: a command that measures each K takes none of it.
_OF_K = (
    "num_speculative_tokens", "max_num_speculative_tokens", "num_speculative_tokens_per_batch_size", "selection",
    "tetris_extra_proposals",
)  # fmt: skip


@dataclass(frozen=True)
class DraftFlags:
    """The flags of these names. None, and "auto", is what is not said."""

    method: str | None = None  # several with commas between them
    draft_model: str | None = None
    drafter: str | None = None
    num_speculative_tokens: int | None = None
    draft_kv_cache_dtype: str = "auto"
    draft_kv_cache_memory_bytes: int | None = None
    draft_kv_window: int | None = None
    speculative_config: str | None = None  # JSON

    def mapping(self, model: str | None, measures_k: bool = False) -> dict[str, Any] | None:
        """What `LLM(model)` takes as its speculative_config; None where the method wants a draft model, and none is
        given for this target. A command that `measures_k` takes nothing that says K.

        Raises:
            ValueError: naming the flag, its value and what is allowed.
        """
        given = self._given(measures_k)
        methods = self._methods(given)
        name = ",".join(map(str, methods))
        draft_model = given.get("model", self.draft_model)
        if self.draft_model is not None and not any(each in WITH_MODEL for each in methods):
            allowed = ", ".join(WITH_MODEL)
            raise ValueError(f"--draft-model={draft_model!r} is for --method {allowed}; --method {name} has none")
        if draft_model is None and any(each in HEADS for each in methods):
            raise ValueError(f"--method={name} needs --draft-model, heads that were trained on the target")
        if self.drafter is not None and name != "custom":
            raise ValueError(f"--drafter={self.drafter!r} is for --method custom; it is {name}")
        if name == "custom" and "drafter" not in given:
            check_callable("--drafter", self.drafter)
        has_draft = draft_model is not None or (model is None and "draft_model" in methods)  # the embedded pair's
        if self.draft_kv_cache_dtype != "auto" and not has_draft:
            raise ValueError(f"--draft-kv-cache-dtype={self.draft_kv_cache_dtype!r} needs a --draft-model")
        of_draft = {"kv_cache_memory_bytes": self.draft_kv_cache_memory_bytes, "kv_window": self.draft_kv_window}
        for name, value in of_draft.items():
            check_use(f"--draft-{name.replace('_', '-')}", value, has_draft, "a --draft-model alone, and there is none")
        if len(methods) > 1 and "draft_model" in methods and not has_draft:
            raise ValueError(f"--method={name} needs --draft-model beside --model={model!r}")
        said = {
            "model": self.draft_model,
            "num_speculative_tokens": self.num_speculative_tokens,
            "kv_cache_dtype": self.draft_kv_cache_dtype,
            "drafter": self.drafter,
        }
        mapping = {"method": methods} | said | of_draft | given
        SpeculativeConfig.from_mapping(mapping)  # is all of it known?
        return mapping if has_draft or "draft_model" not in methods else None

    def _given(self, measures_k: bool) -> dict[str, Any]:
        """What --speculative-config says, and no flag."""
        text = self.speculative_config
        if text is None:
            return {}
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ValueError(f"--speculative-config={text!r} is not JSON: {error}; allowed: {_EXAMPLE}") from None
        if not isinstance(given, dict):
            raise ValueError(f"--speculative-config={text!r} is no object; allowed: {_EXAMPLE}")
        dtype = self.draft_kv_cache_dtype
        of_flags = (
            ("method", "--method", self.method),
            ("model", "--draft-model", self.draft_model),
            ("drafter", "--drafter", self.drafter),
            ("num_speculative_tokens", "--num-speculative-tokens", self.num_speculative_tokens),
            ("kv_cache_dtype", "--draft-kv-cache-dtype", None if dtype == "auto" else dtype),
            ("kv_cache_memory_bytes", "--draft-kv-cache-memory-bytes", self.draft_kv_cache_memory_bytes),
            ("kv_window", "--draft-kv-window", self.draft_kv_window),
        )
        for key, flag, value in of_flags:
            if key in given and value is not None:
                raise ValueError(
                    f"{flag}={value!r} is said by --speculative-config, too, {key!r}; allowed: one of both"
                )
        for key in _OF_K if measures_k else ():
            if key in given:
                raise ValueError(f"--speculative-config {key}={given[key]!r} is what is measured; allowed: without it")
        return given

    def _methods(self, given: dict[str, Any]) -> list[Any]:
        """All that draft together; those of --speculative-config are checked by whoever takes them."""
        if self.method is not None or "method" not in given:
            methods = (self.method or "draft_model").split(",")
            for method in methods:
                check_choice("--method", method, METHODS)
            return methods
        method = given["method"]
        return list(method) if isinstance(method, Sequence) and not isinstance(method, str) else [method]
