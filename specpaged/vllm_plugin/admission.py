"""Requests that our worker could not serve as asked are refused by vLLM's front end: an HTTP 400 that says why."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm.engine.arg_utils import EngineArgs
from vllm.v1.sample.logits_processor.interface import LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as LogitsProcessorV2

from specpaged.vllm_plugin import WORKER_CLS
from specpaged.vllm_plugin.params import translated

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams


class _Admission:
    """vLLM asks the logits processors of its configuration whether they can serve a request. These process nothing."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """ValueError, naming a parameter, its value and what is allowed."""
        translated(sampling_params)


class Admission(_Admission, LogitsProcessor):
    """For vLLM's first model runner."""

    def is_argmax_invariant(self) -> bool:
        """See LogitsProcessor."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """See LogitsProcessor."""

    def apply(self, logits: Any) -> Any:
        """See LogitsProcessor."""
        return logits


class AdmissionV2(_Admission, LogitsProcessorV2):
    """For its second one."""


def check_is_in(config: VllmConfig) -> None:
    """Raises RuntimeError where requests would reach the worker unchecked: one of them could end the engine."""
    if not any(str(entry).startswith(f"{__name__}:") for entry in config.model_config.logits_processors or ()):
        raise RuntimeError(
            "specpaged's vLLM plugin was not loaded, and would have checked requests: is specpaged installed here, and "
            f"named in VLLM_PLUGINS if that is set? Or add --logits-processors {__name__}:Admission"
        )


def add_to_configurations() -> None:
    """From here on a configuration that names our worker names our check, as if `--logits-processors` had."""
    original = EngineArgs.create_engine_config
    if hasattr(original, "adds_admission"):
        return

    @functools.wraps(original)
    def create_engine_config(self: EngineArgs, *arguments: Any, **options: Any) -> VllmConfig:
        config = original(self, *arguments, **options)
        if config.parallel_config.worker_cls == WORKER_CLS:
            kind = AdmissionV2 if config.use_v2_model_runner else Admission
            config.model_config.logits_processors = [
                *(config.model_config.logits_processors or ()),
                f"{kind.__module__}:{kind.__qualname__}",
            ]
        return config

    create_engine_config.adds_admission = True
    EngineArgs.create_engine_config = create_engine_config
