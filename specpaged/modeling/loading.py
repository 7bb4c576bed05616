"""HF causal language models, made to run packed on paged KV."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from specpaged.config import NUMERICS
from specpaged.modeling.attention import HOOK
from specpaged.modeling.backend import choose_backend
from specpaged.modeling.checkpoint import check_local_checkpoint
from specpaged.modeling.exact import make_exact, make_fast
from specpaged.modeling.families import check_config, find_layers
from specpaged.modeling.loaded_model import LoadedModel, held_bytes
from specpaged.modeling.norm import fuse_norms, use_kernel_norms
from specpaged.modeling.numerics import InexactError, choose_attention_scheme, fast_attention_scheme
from specpaged.modeling.rope import freeze_rope
from specpaged.modeling.self_check import check_against_eager, check_rows
from specpaged.paging.kv_cache import KVSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    model: str,
    *,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    max_model_len: int | None = None,
    numerics: str = "exact",
    attention_backend: str = "auto",
    block_size: int = 16,
) -> LoadedModel:
    """Loads a causal language model from a local directory or a hub id, safetensors only.

    Raises ValueError, naming the argument or the file, for whatever cannot be loaded or cannot keep its promise:
    under numerics="exact" a model that this machine cannot compute exactly is refused, never loaded inexactly.
    `block_size` is that of the KV caches it will run on.
    """
    device = _check_device(device)
    wanted = _check_dtype(dtype, device)
    if numerics not in NUMERICS:
        raise ValueError(f"numerics must be one of {', '.join(NUMERICS)}, got {numerics!r}")
    config = _load_config(model, trust_remote_code)
    check_config(config, model)
    text_config = config.get_text_config()
    max_model_len = _check_max_model_len(max_model_len, text_config, model)
    if wanted is None and getattr(config, "dtype", None) == torch.float16 and device.type == "cpu":
        wanted = torch.float32
    module = _load_module(model, config, wanted, trust_remote_code)
    if module.dtype not in DTYPES.values():
        raise ValueError(f"dtype of model {model!r} is {module.dtype}; allowed: {', '.join(DTYPES)}")
    if module.dtype == torch.float16 and device.type == "cpu":
        module = module.float()
    # Never .to(dtype): it would round RoPE's frequencies.
    module = module.to(device).eval().requires_grad_(False)
    layers = find_layers(module, model, max_model_len)
    freeze_rope(module, max_model_len)
    geometries = {(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in layers}
    vocab_size = module.get_output_embeddings().weight.shape[0]
    placement = (device, module.dtype, geometries, block_size, vocab_size, numerics)
    backend, not_triton = choose_backend(attention_backend, *placement)
    group = max(hq // hkv for hq, hkv, _ in geometries)
    loaded = LoadedModel(
        module=module,
        hf_config=config,
        name=model,
        architecture=type(module).__name__,
        dtype=module.dtype,
        device=device,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=_eos_token_ids(module, text_config),
        kv_spec=KVSpec(tuple((layer.num_kv_heads, layer.head_dim) for layer in layers)),
        num_parameters=sum(p.numel() for p in module.parameters()),
        weight_bytes=0,  # counted below, once every layer has the form that it keeps
        numerics_scheme=f"fast: attention {backend}; the quickest kernel for each layer and row count; rows depend on "
        "their batch",
        attention_scheme=fast_attention_scheme(module.dtype, device, group),
        backend=backend,
        exact=numerics == "exact",
        num_threads=torch.get_num_threads(),
    )
    if loaded.exact:
        _make_exact(loaded, geometries, not_triton)
    else:
        fuse_norms(module, module.dtype)
        make_fast(module)
    loaded.weight_bytes = held_bytes(module)
    check_against_eager(loaded, block_size)
    if loaded.exact:
        check_rows(loaded, block_size)
    return loaded


def _make_exact(loaded: LoadedModel, geometries: set[tuple[int, int, int]], not_triton: str | None) -> None:
    config = loaded.hf_config.get_text_config()
    inner_sizes = {
        size
        for name in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
        if isinstance(size := getattr(config, name, None), int)
    }
    if getattr(config, "final_logit_softcapping", None) is not None:
        inner_sizes.add(loaded.vocab_size)
    for name, buffer in loaded.module.named_buffers():
        if name.endswith("inv_freq"):
            inner_sizes.add(buffer.shape[-1])
    try:
        (use_kernel_norms if loaded.backend == "triton" else fuse_norms)(loaded.module, loaded.dtype)
        loaded.row_multiple, linears = make_exact(loaded.module, inner_sizes, loaded.dtype, loaded.backend)
        attention = "in fixed splits"
        if loaded.backend != "triton":
            loaded.attention_scheme = choose_attention_scheme(geometries, loaded.dtype, loaded.device)
            attention = loaded.attention_scheme.name
    except InexactError as error:
        hint = f" (and not by Triton's kernels: {not_triton})" if not_triton else ""
        raise InexactError(f"model {loaded.name!r} ({loaded.architecture}): {error}{hint}") from None
    dtype = str(loaded.dtype).removeprefix("torch.")
    threads = f"{loaded.num_threads} thread{'s' if loaded.num_threads > 1 else ''}"
    loaded.numerics_scheme = (
        f"exact: {linears}; attention {loaded.backend} {attention}; rows x{loaded.row_multiple}; {dtype}, {threads}"
    )


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "tekken.json")


def load_tokenizer(model: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside a model; None for a local checkpoint that has none.

    Raises:
        ValueError: there is one, and it cannot be loaded.
    """
    directory = Path(model)
    if directory.is_dir() and not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        return None  # transformers would make up an empty one from config.json
    try:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"model {model!r} has no tokenizer that can be loaded: {_first_line(error)}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """What transformers warns about while it loads is an error here, in one sentence, and its progress bar is noise."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _check_device(device: str | torch.device) -> torch.device:
    try:
        checked = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be 'cpu' or 'cuda[:index]', got {device!r}") from None
    if checked.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'cpu' or 'cuda[:index]', got {device!r}")
    if checked.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, and torch sees no CUDA device here; allowed: 'cpu'")
    return checked


def _check_dtype(dtype: str, device: torch.device) -> torch.dtype | None:
    """None for "auto"."""
    if dtype == "auto":
        return None
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of auto, {', '.join(DTYPES)}, got {dtype!r}")
    if dtype == "float16" and device.type == "cpu":
        raise ValueError("dtype 'float16' is not supported on a CPU; use 'float32' (or 'bfloat16')")
    return DTYPES[dtype]


def _check_max_model_len(max_model_len: int | None, config: PreTrainedConfig, model: str) -> int:
    limit = getattr(config, "max_position_embeddings", None)
    if max_model_len is None:
        if limit is None:
            raise ValueError(f"max_model_len must be given: the config of {model!r} has no max_position_embeddings")
        return limit
    if isinstance(max_model_len, bool) or not isinstance(max_model_len, int) or max_model_len < 1:
        raise ValueError(f"max_model_len must be an integer of at least 1, got {max_model_len!r}")
    if limit is not None and max_model_len > limit:
        parameters = getattr(config, "rope_parameters", None) or {}
        if "dynamic" not in str(parameters.get("rope_type")):
            raise ValueError(f"max_model_len must be at most the {limit} positions of {model!r}, got {max_model_len}")
    return max_model_len


def _load_config(model: str, trust_remote_code: bool) -> PreTrainedConfig:
    if not isinstance(model, str) or not model:
        raise ValueError(f"model must be a local directory or a hub id, got {model!r}")
    local = os.path.exists(model)
    if local:
        check_local_checkpoint(model)
    elif model.startswith(("/", ".", "~")) or model.count("/") > 1 or model.endswith("/"):
        raise ValueError(
            f"model {model!r} does not exist; it must be a local directory or a hub id (name or owner/name)"
        )
    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        if local:
            raise ValueError(f"model {model!r}: config.json cannot be used: {_first_line(error)}") from error
        raise ValueError(
            f"model {model!r} is no local directory, and its config could not be had from the hub "
            f"(no such repository, or no network): {_first_line(error)}"
        ) from error


def _load_module(model: str, config: PreTrainedConfig, dtype: torch.dtype | None, trust_remote_code: bool) -> nn.Module:
    options: dict[str, Any] = dict(
        config=config,
        dtype=dtype or "auto",
        attn_implementation=HOOK,
        use_safetensors=True,
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are reported below, all of them
    )
    try:
        with _quiet():
            module, info = AutoModelForCausalLM.from_pretrained(model, **options)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, AttributeError) as error:
        if HOOK in str(error):
            raise ValueError(
                f"model {model!r} ({config.model_type}) is not supported: its attention cannot be replaced by ours"
            ) from error
        raise ValueError(f"model {model!r} ({config.model_type}) cannot be loaded: {_first_line(error)}") from error
    problems = {
        "missing": sorted(map(str, info["missing_keys"])),
        "unexpected": sorted(map(str, info["unexpected_keys"])),
        "of another shape": sorted(str(key[0] if isinstance(key, tuple) else key) for key in info["mismatched_keys"]),
    }
    if any(problems.values()):
        found = "; ".join(
            f"{len(keys)} {kind} ({', '.join(keys[:3])}{', ...' if len(keys) > 3 else ''})"
            for kind, keys in problems.items()
            if keys
        )
        raise ValueError(
            f"model {model!r}: the weights are not those of {type(module).__name__}, named by config.json: {found}"
        )
    names = getattr(config, "architectures", None) or []
    if names and names[0].endswith("ForCausalLM") and names[0] != type(module).__name__:
        raise ValueError(
            f"model {model!r}: config.json names the architecture {names[0]}, its model_type {config.model_type!r} is "
            f"{type(module).__name__}"
        )
    return module


def _eos_token_ids(module: nn.Module, config: PreTrainedConfig) -> tuple[int, ...]:
    eos = getattr(getattr(module, "generation_config", None), "eos_token_id", None)
    if eos is None:
        eos = getattr(config, "eos_token_id", None)
    if eos is None:
        return ()
    return tuple(int(i) for i in eos) if isinstance(eos, (list, tuple)) else (int(eos),)
