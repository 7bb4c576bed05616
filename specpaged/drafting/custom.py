"""Drafters of somebody else's: how one is found, and what it is made of."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from specpaged.config import EngineConfig
from specpaged.drafting.checked import CheckedDrafter
from specpaged.modeling.forward_output import HiddenStatesRequest
from specpaged.modeling.model_runner import ModelRunner
from specpaged.speculative_config import SpeculativeConfig

_ALLOWED = "allowed: 'package.module:Class', on Python's path, of a class with the methods of specpaged's Drafter"


@dataclass(frozen=True)
class DrafterContext:
    """What a drafter may know of the engine that it drafts for. Sizes are in tokens, unless said otherwise."""

    model: str  # the target: a local path or hub id
    vocab_size: int  # token ids that may be drafted: 0 .. vocab_size - 1
    hidden_size: int  # elements of a hidden state of the target
    num_layers: int  # of the target
    max_model_len: int  # of prompt and output together
    max_num_seqs: int  # sequences of a batch
    max_draft_tokens: int  # that are ever asked for
    block_size: int
    device: torch.device  # of hidden states
    dtype: torch.dtype  # of hidden states

    @classmethod
    def of(cls, config: EngineConfig, target: ModelRunner, vocab_size: int) -> DrafterContext:
        """The context of an engine of this configuration, whose `max_model_len` is resolved."""
        return cls(
            model=config.model,
            vocab_size=vocab_size,
            hidden_size=target.model.hidden_size,
            num_layers=len(target.kv_cache.layers),
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_draft_tokens=config.speculative_config.max_draft_tokens,
            block_size=config.block_size,
            device=target.model.device,
            dtype=target.model.dtype,
        )


def name_of(drafter: str | Callable[..., Any]) -> str:
    """'package.module:Class', of a class or another callable, too."""
    if isinstance(drafter, str):
        return drafter
    return f"{drafter.__module__}:{drafter.__qualname__}" if hasattr(drafter, "__qualname__") else repr(drafter)


def find_drafter(drafter: str | Callable[..., Any]) -> Callable[..., Any]:
    """The class that `drafter` names, or what it is itself.

    Raises:
        ValueError: naming speculative_config['drafter'], for a module that cannot be imported or has no such name.
    """
    if not isinstance(drafter, str):
        return drafter
    module, _, attribute = drafter.partition(":")
    try:
        found = attrgetter(attribute)(importlib.import_module(module))
    except Exception as error:  # of any kind: it is somebody else's module
        raise _refusal(drafter, "cannot be imported", error) from error
    if not callable(found):
        raise _refusal(drafter, f"is no class, but {type(found).__name__}")
    return found


def load_drafter(config: SpeculativeConfig, context: DrafterContext, target: ModelRunner) -> CheckedDrafter:
    """The drafter that `config` names, made of the context and the configuration's options.

    Raises:
        ValueError: naming speculative_config['drafter'], where it cannot be imported or made, is no drafter, asks for
            hidden states that the target does not have, or gives no probabilities though rejection sampling asks.
    """
    name = config.drafter
    make = find_drafter(name)
    try:
        drafter = make(context, **config.drafter_options)
    except Exception as error:
        of_options = f"cannot be made with drafter_options={dict(config.drafter_options)!r}"
        raise _refusal(name, of_options, error) from error
    for method in ("propose", "forget"):
        if not callable(getattr(drafter, method, None)):
            raise _refusal(name, f"is no drafter: {type(drafter).__name__} has no method {method!r}")
    wants_probs = config.verification == "rejection"
    if wants_probs and not getattr(drafter, "gives_probs", False):
        raise ValueError(
            f"speculative_config['drafter']={name_of(name)!r} does not say that it `gives_probs`, which "
            "verification='rejection' asks for; allowed: verification='coupled' or 'greedy'"
        )
    try:
        checked = CheckedDrafter(drafter, context.vocab_size, wants_probs)
        hidden_states = checked.hidden_states
        if hidden_states is not None:
            if not isinstance(hidden_states, HiddenStatesRequest):
                raise ValueError(f"{hidden_states!r} is no HiddenStatesRequest")
            if not (hidden_states.last or hidden_states.layer_inputs):
                raise ValueError("HiddenStatesRequest() asks for none; None does that")
            target.check_hidden_states(hidden_states)
    except Exception as error:
        raise _refusal(name, "asks for hidden_states that there are not", error) from error
    return checked


def _refusal(drafter: str | Callable[..., Any], what: str, error: Exception | None = None) -> ValueError:
    reason = ""
    if error is not None:
        lines = str(error).splitlines()
        reason = f" ({type(error).__name__}: {lines[0]})" if lines else f" ({type(error).__name__})"
    return ValueError(f"speculative_config['drafter']={name_of(drafter)!r} {what}{reason}; {_ALLOWED}")
