"""HF causal language models, made to run packed on paged KV."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from specpaged.checks import check_choice
from specpaged.config import MODEL_IMPLS, NUMERICS
from specpaged.modeling.backend import choose_backend
from specpaged.modeling.checkpoint import check_local_checkpoint, first_line
from specpaged.modeling.exact import ExactLinears
from specpaged.modeling.families import check_config
from specpaged.modeling.flat.source import FlatSource
from specpaged.modeling.linear import OWN_KERNELS, RowExactLinear
from specpaged.modeling.loaded_model import LoadedModel, held_bytes
from specpaged.modeling.numerics import InexactError, choose_attention_scheme, fast_attention_scheme
from specpaged.modeling.self_check import check_against_eager, check_rows
from specpaged.modeling.shard import Shard
from specpaged.modeling.source import Source
from specpaged.modeling.transformers_source import TransformersSource
from specpaged.paging.kv_cache import KVSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = DTYPES | {"fp8_e4m3": torch.float8_e4m3fn}
KV_DTYPE_BACKENDS = ("cpp", "torch")  # whose attention reads KV of another dtype than its own


def load_model(
    model: str,
    *,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    max_model_len: int | None = None,
    numerics: str = "exact",
    attention_backend: str = "auto",
    model_impl: str = "auto",
    block_size: int = 16,
    shard: Shard | None = None,
) -> LoadedModel:
    """Loads a causal language model from a local directory or a hub id, safetensors only; or one rank's part of it.

    Raises ValueError, naming the argument or the file, for whatever cannot be loaded or cannot keep its promise:
    under numerics="exact" a model that this machine cannot compute exactly is refused, never loaded inexactly.
    `block_size` is that of the KV caches it will run on.
    """
    device = _check_device(device)
    wanted = _check_dtype(dtype, device)
    if numerics not in NUMERICS:
        raise ValueError(f"numerics must be one of {', '.join(NUMERICS)}, got {numerics!r}")
    check_choice("model_impl", model_impl, MODEL_IMPLS)
    config = load_config(model, trust_remote_code)
    check_config(config, model)
    text_config = config.get_text_config()
    max_model_len = _check_max_model_len(max_model_len, text_config, model)
    source, not_flat = _open(model_impl, model, config, wanted, device, max_model_len, trust_remote_code, shard)
    loaded = compute_form(
        source,
        config,
        model,
        device=device,
        max_model_len=max_model_len,
        kv_cache_dtype=kv_cache_dtype,
        numerics=numerics,
        attention_backend=attention_backend,
        block_size=block_size,
        not_flat=not_flat,
        eos_token_ids=_eos_token_ids(model, text_config),
    )
    if shard is not None:
        # Other kernels choose how to add up by a matrix's shape, which splitting changes.
        kernels = {module.scheme.kernel for module in loaded.decoder.modules() if isinstance(module, RowExactLinear)}
        is_ours = loaded.exact and loaded.backend in OWN_KERNELS and kernels <= OWN_KERNELS
        bits = "the bits of one" if is_ours else "bits differ from those of one"
        loaded.numerics_scheme += f"; rank {shard.rank} of {shard.size}, {bits}"
    if loaded.implementation == "transformers":
        check_against_eager(loaded, block_size)
    if loaded.exact:
        check_rows(loaded, block_size)
    return loaded


def compute_form(
    source: Source,
    config: PreTrainedConfig,
    name: str,
    *,
    device: torch.device,
    max_model_len: int,
    kv_cache_dtype: str,
    numerics: str,
    attention_backend: str,
    block_size: int,
    not_flat: str | None = None,
    eos_token_ids: tuple[int, ...] = (),
) -> LoadedModel:
    """The model of an open checkpoint, in the form in which it computes; nothing of it has been checked yet.

    Raises:
        ValueError: for a backend or a KV dtype that it cannot have, or numerics="exact" where that is not possible.
    """
    geometries = {(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in source.layers}
    placement = (device, source.dtype, geometries, block_size, source.vocab_size, numerics)
    backend, not_ours = choose_backend(attention_backend, *placement)
    kv_dtype = _check_kv_dtype(kv_cache_dtype, source.dtype, backend)
    synthetic = getattr(config, "synthetic", None)  # see specpaged.testing
    facts = dict(
        implementation=source.implementation,
        not_flat=not_flat,
        not_ours=not_ours,
        hf_config=config,
        name=name,
        architecture=source.architecture + (f" ({synthetic})" if synthetic else ""),
        dtype=source.dtype,
        kv_dtype=kv_dtype,
        device=device,
        vocab_size=source.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
        kv_spec=KVSpec(tuple((layer.num_kv_heads, layer.head_dim) for layer in source.layers)),
        num_parameters=source.num_parameters,
        backend=backend,
        num_threads=torch.get_num_threads(),
    )
    if numerics == "exact":
        try:
            return _exact(source, geometries, facts)
        except InexactError as error:
            hint = f" (and not by our own kernels: {not_ours})" if not_ours else ""
            raise InexactError(f"model {name!r} ({source.architecture}): {error}{hint}") from None
    group = max(hq // hkv for hq, hkv, _ in geometries)
    decoder = source.fast(backend)
    return LoadedModel(
        decoder=decoder,
        weight_bytes=held_bytes(decoder),
        numerics_scheme=f"fast: attention {backend}; a quick kernel for each layer and row count; rows may depend on "
        "their batch",
        attention_scheme=fast_attention_scheme(source.dtype, device, group),
        exact=False,
        **facts,
    )


def _open(
    model_impl: str,
    model: str,
    config: PreTrainedConfig,
    dtype: torch.dtype | None,
    device: torch.device,
    max_model_len: int,
    trust_remote_code: bool,
    shard: Shard | None,
) -> tuple[Source, str | None]:
    """The model in the implementation asked for, and why it is not the flat one."""
    arguments = (model, config, dtype, device, max_model_len, trust_remote_code)
    reason = "model_impl is 'transformers'"
    if model_impl != "transformers":
        source = FlatSource.open(*arguments, shard)
        if isinstance(source, FlatSource):
            return source, None
        reason = source
    if shard is not None:
        raise ValueError(f"model {model!r} cannot be split over {shard.size} ranks: {reason}")
    if model_impl == "flat":
        raise ValueError(f"model_impl='flat' cannot run {model!r}: {reason}; allowed: 'transformers', or 'auto'")
    return TransformersSource(*arguments), reason


def _exact(source: Source, geometries: set[tuple[int, int, int]], facts: dict) -> LoadedModel:
    dtype, device, backend, num_threads = (facts[name] for name in ("dtype", "device", "backend", "num_threads"))
    linears = ExactLinears(device, backend)
    decoder, inner_sizes = source.exact(linears)
    row_multiple = linears.row_multiple(inner_sizes, dtype)
    attention, attention_scheme = "in fixed splits", None
    if backend == "torch":
        attention_scheme = choose_attention_scheme(geometries, dtype, device)
        attention = attention_scheme.name
    threads = f"{num_threads} thread{'s' if num_threads > 1 else ''}"
    return LoadedModel(
        decoder=decoder,
        weight_bytes=held_bytes(decoder),
        numerics_scheme=f"exact: {linears}; attention {backend} {attention}; rows x{row_multiple}; "
        f"{str(dtype).removeprefix('torch.')}, {threads}",
        attention_scheme=attention_scheme,
        exact=True,
        row_multiple=row_multiple,
        **facts,
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
        raise ValueError(f"model {model!r} has no tokenizer that can be loaded: {first_line(error)}") from error


def _check_device(device: str | torch.device) -> torch.device:
    try:
        checked = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be 'cpu' or 'cuda[:index]', got {device!r}") from None
    if checked.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'cpu' or 'cuda[:index]', got {device!r}")
    if checked.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, and torch sees no CUDA device here; allowed: 'cpu'")
    if checked.index is not None and checked.type == "cuda" and checked.index >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise ValueError(f"device is {device!r}; allowed here: 'cpu', 'cuda', 'cuda:0' .. 'cuda:{last}'")
    return checked


def _check_dtype(dtype: str, device: torch.device) -> torch.dtype | None:
    """The dtype by its name; None for "auto". Raises ValueError."""
    if dtype == "auto":
        return None
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of auto, {', '.join(DTYPES)}, got {dtype!r}")
    if dtype == "float16" and device.type == "cpu":
        raise ValueError("dtype 'float16' is not supported on a CPU; use 'float32' (or 'bfloat16')")
    return DTYPES[dtype]


def _check_kv_dtype(kv_cache_dtype: str, dtype: torch.dtype, backend: str) -> torch.dtype:
    """What keys and values are stored as. Raises ValueError."""
    check_choice("kv_cache_dtype", kv_cache_dtype, ("auto", *KV_DTYPES))
    wanted = KV_DTYPES.get(kv_cache_dtype, dtype)
    if wanted != dtype and backend not in KV_DTYPE_BACKENDS:
        raise ValueError(
            f"kv_cache_dtype={kv_cache_dtype!r} beside {str(dtype).removeprefix('torch.')} is for attention_backend "
            f"{' and '.join(KV_DTYPE_BACKENDS)}; here it is {backend!r}; allowed: 'auto'"
        )
    return wanted


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


def load_config(model: str, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration of a local directory or a hub id. ValueError where there is none that can be used."""
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
    except Exception as error:  # a config class may raise anything of what it does not expect
        if local:
            raise ValueError(f"model {model!r}: config.json cannot be used: {first_line(error)}") from error
        raise ValueError(
            f"model {model!r} is no local directory, and its config could not be had from the hub "
            f"(no such repository, or no network): {first_line(error)}"
        ) from error


def _eos_token_ids(model: str, config: PreTrainedConfig) -> tuple[int, ...]:
    try:
        eos = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:  # there is no such file
        eos = None
    if eos is None:
        eos = getattr(config, "eos_token_id", None)
    if eos is None:
        return ()
    return tuple(int(i) for i in eos) if isinstance(eos, (list, tuple)) else (int(eos),)
