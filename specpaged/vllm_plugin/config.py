"""vLLM's configuration as ours, and what of it the worker refuses, by name, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any

from vllm.config import VllmConfig

from specpaged.checks import check_choice, check_names
from specpaged.config import ATTENTION_BACKENDS, DRAFT_KV_DTYPES, DTYPES, MODEL_IMPLS, NUMERICS, EngineConfig
from specpaged.drafting import require_drafter
from specpaged.speculative_config import METHODS, SUFFIX_DECODING, WITH_MODEL, SpeculativeConfig

LOAD_FORMATS = ("auto", "hf", "safetensors")
# Keys of `--additional-config '{"specpaged": {...}}'`.
OPTIONS: dict[str, tuple[str | bool, ...]] = {
    "adaptive": (True, False),
    "lookups": ("ngram", "suffix", "ngram,suffix", "suffix,ngram"),  # beside speculative_config's method with a model
    "numerics": NUMERICS,
    "draft_numerics": NUMERICS,
    "kv_cache_dtype": DTYPES,
    "draft_kv_cache_dtype": DRAFT_KV_DTYPES,
    "attention_backend": ATTENTION_BACKENDS,
    "model_impl": MODEL_IMPLS,
    "device_round": (True, False),
    "tensor_parallel_graphs": (True, False),
}
DRAFTER_OPTIONS = "drafter_options"  # another key: what a custom drafter is made with, a mapping
DRAFT_OPTIONS = [key for key in OPTIONS if key.startswith("draft_")]

# Of a step, and of each of its sequences, beside the passes: vLLM's engine, and ours, until it has been heard.
REST_SECONDS = 5e-4, 3.7e-5


def engine_config(vllm_config: VllmConfig, device: str) -> EngineConfig:
    """The engine configuration that vLLM's configuration amounts to.

    Raises:
        ValueError: naming what was asked for and is not supported, and what is allowed.
    """
    refused = next(_refusals(vllm_config), None)
    if refused is not None:
        raise ValueError(f"{refused} under specpaged's worker")
    given = options(vllm_config.additional_config)
    model, scheduler, cache = vllm_config.model_config, vllm_config.scheduler_config, vllm_config.cache_config
    of_draft = {key.removeprefix("draft_"): given.pop(key) for key in DRAFT_OPTIONS if key in given}
    asked = vllm_config.speculative_config
    method, path = (None, None) if asked is None else _method(asked.method, asked.model)
    if of_draft and method not in WITH_MODEL:
        name, value = next(iter(of_draft.items()))
        raise ValueError(
            f"--additional-config specpaged['draft_{name}']={value!r} needs a speculative_config with a method of "
            f"{', '.join(WITH_MODEL)}"
        )
    if given.get("device_round") and not scheduler.async_scheduling:
        raise ValueError(
            "--additional-config specpaged['device_round']=True needs asynchronous scheduling, which vLLM has off; "
            "allowed without it: False"
        )
    # A rank that could not capture a pass would leave the others waiting in theirs, were it not for what they agree on.
    ranks_capture = given.pop("tensor_parallel_graphs", False)
    enforce_eager = model.enforce_eager or (vllm_config.parallel_config.tensor_parallel_size > 1 and not ranks_capture)
    made_with = given.pop(DRAFTER_OPTIONS, None)
    if made_with is not None and method != "custom":
        raise ValueError(
            f"--additional-config specpaged[{DRAFTER_OPTIONS!r}]={made_with!r} needs a speculative_config with method "
            "custom_class"
        )
    lookups = given.pop("lookups", None)
    if lookups is not None and method not in WITH_MODEL:
        raise ValueError(
            f"--additional-config specpaged['lookups']={lookups!r} needs a speculative_config with a method of "
            f"{', '.join(WITH_MODEL)}"
        )
    speculative = None
    is_adaptive = given.pop("adaptive", True)
    if asked is not None:
        of_method = {"model": path}
        if method == "ngram":
            of_method = {"prompt_lookup_min": asked.prompt_lookup_min, "prompt_lookup_max": asked.prompt_lookup_max}
        elif method == "suffix":
            of_method = {name: getattr(asked, name) for name in SUFFIX_DECODING}
        elif method == "custom":
            of_method = {"drafter": path, DRAFTER_OPTIONS: made_with}
        else:
            of_method |= of_draft
        if is_adaptive and not asked.num_speculative_tokens_per_batch_size:
            of_method |= {"num_speculative_tokens": "auto", "max_num_speculative_tokens": asked.num_speculative_tokens}
        else:  # of which vLLM's scheduler asks fewer, where it is told so by batch size
            of_method["num_speculative_tokens"] = asked.num_speculative_tokens
        methods = [*lookups.split(","), method] if lookups is not None else method
        speculative = SpeculativeConfig(method=methods, **of_method)
        require_drafter(speculative)
    return EngineConfig(
        model=model.model,
        speculative_config=speculative,
        dtype=str(model.dtype).removeprefix("torch."),
        device=device,
        block_size=cache.block_size,
        max_model_len=model.max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs),
        enable_prefix_caching=cache.enable_prefix_caching,
        enforce_eager=enforce_eager,
        seed=model.seed,
        trust_remote_code=model.trust_remote_code,
        **given,
    )


def _method(method: str, model: str | None) -> tuple[str, str | None]:
    """Our method, and its model or its class, by vLLM's.

    A custom class is one of our drafters, "package.module:Class" or as vLLM spells it, "package.module.Class". vLLM has
    no name for Clover's heads: they are "clover:DIR" there.
    """
    if method != "custom_class":
        return method, model
    name, separator, path = (model or "").partition(":")
    if name == "clover" and separator:
        return name, path
    return "custom", model if separator or not model else ":".join(model.rsplit(".", 1))


def options(additional_config: Any) -> dict[str, Any]:
    """The plugin's own options, out of vLLM's additional_config.

    Raises:
        ValueError: naming a key or a value that is not known, and those that are.
    """
    given = additional_config.get("specpaged", {}) if isinstance(additional_config, Mapping) else {}
    name, keys = "--additional-config specpaged", [*OPTIONS, DRAFTER_OPTIONS]
    if not isinstance(given, Mapping):
        raise ValueError(f"{name}={given!r} must be an object with some of the keys {', '.join(keys)}")
    for key, value in given.items():
        if key not in keys:
            raise ValueError(f"{name} has no key {key!r}; allowed: {', '.join(keys)}")
        if key == DRAFTER_OPTIONS:
            check_names(f"{name}[{key!r}]", value)
        else:
            check_choice(f"{name}[{key!r}]", value, OPTIONS[key])
    return dict(given)


def _refusals(config: VllmConfig) -> Iterator[str]:
    """What `check_arguments` cannot see: what comes of a checkpoint, or stands for several arguments."""
    model, speculative = config.model_config, config.speculative_config
    load_format = config.load_config.load_format
    for name, value, choices in (
        ("--load-format", str(getattr(load_format, "value", load_format)), LOAD_FORMATS),
        ("--runner", model.runner_type, ("generate",)),
        ("the checkpoint's quantization", model.quantization, (None,)),
        (
            "speculative_config method",
            METHODS[0] if speculative is None else _method(speculative.method, speculative.model)[0],
            METHODS,
        ),
    ):
        if value not in choices:
            yield f"{name}={value!r} is not supported (allowed: {', '.join(map(str, choices))})"
    if model.is_multimodal_model:
        yield f"the multimodal model {model.model!r} is not supported (allowed: text models)"
    for plugin in entry_points(group="vllm.logits_processors"):
        yield f"the logits processor {plugin.value!r} of an installed package is not supported (allowed: none)"
