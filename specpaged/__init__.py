"""Batch speculative decoding on paged KV that cannot be told from plain decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOMES = {
    "LLM": "specpaged.llm",
    "Engine": "specpaged.engine.engine",
    "EngineConfig": "specpaged.config",
    "SpeculativeConfig": "specpaged.speculative_config",
    "SamplingParams": "specpaged.sampling_params",
    "RequestOutput": "specpaged.outputs",
    "CompletionOutput": "specpaged.outputs",
}
__all__ = [
    "LLM",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "SpeculativeConfig",
]

if TYPE_CHECKING:
    from specpaged.config import EngineConfig
    from specpaged.engine.engine import Engine
    from specpaged.llm import LLM
    from specpaged.outputs import CompletionOutput, RequestOutput
    from specpaged.sampling_params import SamplingParams
    from specpaged.speculative_config import SpeculativeConfig


def __getattr__(name: str):
    """Public names load their module on first use: `import specpaged` alone imports no torch."""
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'specpaged' has no attribute {name!r}; public names: {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
