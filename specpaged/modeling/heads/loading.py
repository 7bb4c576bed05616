"""Heads from a local directory or a hub id, made to run beside their target."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from specpaged.checks import check_choice
from specpaged.config import NUMERICS
from specpaged.modeling.checkpoint import check_local_checkpoint, first_line
from specpaged.modeling.flat.decoder import FlatDecoder
from specpaged.modeling.flat.weights import Checkpoint
from specpaged.modeling.heads.config import HeadsConfig
from specpaged.modeling.heads.source import HeadsSource, flat_decoder
from specpaged.modeling.loaded_model import LoadedModel, held_bytes
from specpaged.modeling.loading import compute_form


def heads_config_dict(model: str) -> dict[str, Any]:
    """The config.json of heads.

    Raises:
        ValueError: there is none.
    """
    if os.path.exists(model):
        check_local_checkpoint(model)
    try:
        return PreTrainedConfig.get_config_dict(model)[0]
    except Exception as error:
        raise ValueError(
            f"speculative_config['model']={model!r} is no local directory, and its config could not be had from the "
            f"hub (no such repository, or no network): {first_line(error)}"
        ) from error


def load_heads(
    model: str,
    method: str,
    target: LoadedModel,
    *,
    kv_cache_dtype: str = "auto",
    numerics: str = "fast",
    attention_backend: str = "auto",
    block_size: int = 16,
) -> LoadedModel:
    """Heads of a `method`, "eagle3" or "clover", in the target's dtype and on its device.

    Raises:
        ValueError: they cannot be loaded, or are not of this target; the message names the file or the key.
    """
    check_choice("speculative_config['numerics']", numerics, NUMERICS)
    if not isinstance(flat_decoder(target), FlatDecoder):
        raise ValueError(
            f"speculative_config['method']={method!r} needs a target whose layers are ours: {target.not_flat}; "
            "allowed here: method 'draft_model', 'ngram' or 'suffix'"
        )
    config = heads_config_dict(model)
    try:
        ours = HeadsConfig.of(method, config, len(target.kv_spec.layers), target.hidden_size, target.vocab_size)
        source = HeadsSource(ours, Checkpoint(model), target)
        loaded = compute_form(
            source,
            ours.hf_config,
            model,
            device=torch.device(target.device),
            max_model_len=target.max_model_len,
            kv_cache_dtype=kv_cache_dtype,
            numerics=numerics,
            attention_backend=attention_backend,
            block_size=block_size,
        )
    except Exception as error:  # transformers' configuration may raise anything of what it does not expect
        reason = str(error) if type(error) is ValueError else f"{type(error).__name__}: {first_line(error)}"
        raise ValueError(
            f"speculative_config['model']={model!r} has no {method} heads for this target: {reason}"
        ) from error
    # What they share with the target is the target's.
    both = held_bytes(nn.ModuleList([target.decoder, loaded.decoder]))
    loaded.weight_bytes = both - held_bytes(target.decoder)
    return loaded
