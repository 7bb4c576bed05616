"""An engine whose clock waits for the device: each stage holds its own work, and the whole is slower for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from specpaged.llm import LLM


def synchronize(llm: LLM) -> None:
    """Wait for the device behind every pass of a model and everything that a KV layout does. Nothing on a CPU."""
    engine = llm.engine
    device = engine.target.model.device
    if device.type != "cuda":
        return
    for runner in (engine.target, engine.draft):
        if runner is not None:
            for name in ("forward", "greedy", "greedy_steps"):
                setattr(runner, name, waiting(getattr(runner, name), device))
    for name in ("place", "realign"):
        setattr(engine.kv_layout, name, waiting(getattr(engine.kv_layout, name), device))


def waiting(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """The function, which returns when the device has done its work."""

    def call(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        torch.cuda.synchronize(device)
        return result

    return call
