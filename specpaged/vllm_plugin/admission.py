"""Requests that our worker could not serve as asked are refused by vLLM's front end: an HTTP 400 that says why."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import vllm
from typing_extensions import override
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor.interface import LogitsProcessor

from specpaged.engine.request import validate_num_speculative_tokens
from specpaged.vllm_plugin import WORKER_CLS
from specpaged.vllm_plugin.arguments import check_arguments
from specpaged.vllm_plugin.compat import check_version
from specpaged.vllm_plugin.params import translated

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig


_SERVED = "_served_by_specpaged"  # marks a SpeculativeConfig


class _Admission:
    """vLLM asks the logits processors of its configuration whether they can serve a request. These process nothing."""

    max_draft_tokens = 0

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError for parameters that we cannot serve, naming one, its value and what is allowed."""
        validate_num_speculative_tokens(translated(sampling_params), cls.max_draft_tokens)


class Admission(_Admission, LogitsProcessor):
    """For vLLM's first model runner, which takes a class that it could make and run."""

    @override
    def is_argmax_invariant(self) -> bool:
        return True

    @override
    def update_state(self, batch_update: Any) -> None:
        """Nothing to do: no row's logits change, so nothing is kept of a batch."""

    @override
    def apply(self, logits: Any) -> Any:
        return logits


@functools.cache
def __getattr__(name: str) -> type:
    """`AdmissionUpTo4`, `AdmissionV2UpTo4`: for that many draft tokens, under vLLM's first and second model runner.

    A configuration names a logits processor by a string, in whatever process it is used.
    """
    kind, _, limit = name.partition("UpTo")
    if kind not in ("Admission", "AdmissionV2") or not limit.isdecimal():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    bases: tuple[type, ...] = (Admission,)
    if kind == "AdmissionV2":
        from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as LogitsProcessorV2

        bases = (_Admission, LogitsProcessorV2)
    return type(name, bases, {"max_draft_tokens": int(limit)})


def entry_for(config: VllmConfig) -> str:
    """The string by which vLLM's `logits_processors` names our check of requests."""
    kind = "AdmissionV2" if config.use_v2_model_runner else "Admission"
    speculative = config.speculative_config
    return f"{__name__}:{kind}UpTo{speculative.num_speculative_tokens if speculative is not None else 0}"


def check_is_in(config: VllmConfig) -> None:
    """Raises RuntimeError where requests would reach the worker unchecked: one of them could end the engine."""
    if entry_for(config) not in (config.model_config.logits_processors or ()):
        raise RuntimeError(
            "specpaged's vLLM plugin was not loaded, and would have checked arguments and requests: is specpaged "
            "installed here, and named in VLLM_PLUGINS if that is set?"
        )


def add_to_configurations() -> None:
    """From here on arguments that name our worker are checked, and their configuration names our check of requests."""
    original = EngineArgs.create_engine_config
    if hasattr(original, "adds_admission"):
        return

    @functools.wraps(original)
    def create_engine_config(self: EngineArgs, *arguments: Any, **options: Any) -> VllmConfig:
        if self.worker_cls != WORKER_CLS:
            return original(self, *arguments, **options)
        check_version(vllm.__version__)
        check_arguments(self)
        config = original(self, *arguments, **options)
        config.model_config.logits_processors = [entry_for(config)]
        _let_through(config.speculative_config)
        _take_drafts_with_outputs(config)
        return config

    create_engine_config.adds_admission = True
    EngineArgs.create_engine_config = create_engine_config


def _take_drafts_with_outputs(config: VllmConfig) -> None:
    """Where a process of its own runs our worker, it is not asked for drafts in a call of their own."""
    parallel = config.parallel_config
    if config.speculative_config is None or config.scheduler_config.async_scheduling:
        return
    if parallel.distributed_executor_backend == "mp":
        from specpaged.vllm_plugin.executor import DraftingExecutor

        parallel.distributed_executor_backend = DraftingExecutor


def _let_through(config: SpeculativeConfig | None) -> None:
    """Requests under this configuration may have min_p and logit_bias, which our sampling heeds beside drafts.

    vLLM refuses them beside any, as its own does not. It asks the request, and passes it this configuration.
    """
    original = getattr(SamplingParams, "_validate_spec_decode", None)
    if config is None or original is None:
        return
    object.__setattr__(config, _SERVED, True)
    if hasattr(original, "knows_ours"):
        return

    @functools.wraps(original)
    def validate(self: SamplingParams, speculative_config: SpeculativeConfig | None) -> None:
        if not getattr(speculative_config, _SERVED, False):
            original(self, speculative_config)

    validate.knows_ours = True
    SamplingParams._validate_spec_decode = validate
