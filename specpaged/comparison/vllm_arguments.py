"""What asks `vllm serve` for the drafts that were measured here."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from specpaged.speculative_config import DEFAULT_PROMPT_LOOKUP, SUFFIX_DECODING, WITH_MODEL, SpeculativeConfig

_OF_LOOKUPS = {"prompt_lookup_min": DEFAULT_PROMPT_LOOKUP, "prompt_lookup_max": DEFAULT_PROMPT_LOOKUP}
_OF_LOOKUPS |= {name: default for name, (default, _) in SUFFIX_DECODING.items()}
_OF_MODELS = {f.name: f.default for f in fields(SpeculativeConfig) if f.name in ("numerics", "kv_cache_dtype")}

_OURS_ALONE = {  # settings that vLLM has no place for
    f.name: f.default
    for f in fields(SpeculativeConfig)
    if f.name in ("device", "kv_cache_memory_bytes", "kv_window", "verification")
}


def vllm_arguments(speculative: SpeculativeConfig, num_speculative_tokens: int) -> dict[str, dict[str, Any]]:
    """What arguments of these names take, as JSON, to have the worker draft so: of as many tokens as it decides, up to
    num_speculative_tokens.

    Raises:
        ValueError: vLLM has no words for that.
    """
    lookups, method = speculative.lookups, speculative.model_method
    if ours := _said(speculative, _OURS_ALONE):
        (name, value), *_ = ours.items()
        raise ValueError(f"vLLM has no words for {name}={value!r}; allowed there: the default")
    if method is None and len(lookups) > 1:
        raise ValueError(
            f"vLLM has no words for method={list(lookups)!r} without a model; allowed there: one of them, or beside it "
            f"one of {', '.join(WITH_MODEL)}"
        )
    config: dict[str, Any] = {"method": method or speculative.method}
    options: dict[str, Any] = {}
    of_lookups = _said(speculative, _OF_LOOKUPS)
    if method is None:
        config |= of_lookups
    else:
        config["model"] = speculative.model
        options |= {f"draft_{name}": value for name, value in _said(speculative, _OF_MODELS).items()}
        if lookups:
            options["lookups"] = ",".join(lookups)
        for name, value in of_lookups.items():
            raise ValueError(f"vLLM has no words for {name}={value!r} beside a model; allowed there: the default")
    if method == "clover":
        config = {"method": "custom_class", "model": f"clover:{speculative.model}"}
    elif speculative.method == "custom":
        config = {"method": "custom_class", "model": speculative.drafter}
        if speculative.drafter_options:
            options["drafter_options"] = dict(speculative.drafter_options)
    config["num_speculative_tokens"] = num_speculative_tokens
    arguments = {"speculative_config": config}
    return arguments | {"additional_config": {"specpaged": options}} if options else arguments


def _said(speculative: SpeculativeConfig, defaults: dict[str, Any]) -> dict[str, Any]:
    """The settings that are not as they are by default; None is another method's."""
    of_names = {name: getattr(speculative, name) for name in defaults}
    return {name: value for name, value in of_names.items() if value not in (None, defaults[name])}
