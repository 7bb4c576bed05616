"""Calls that vLLM makes on a worker by name, and that ours need not or cannot heed: refused ones change nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any, Concatenate, ParamSpec, TypeVar

from vllm.logger import init_logger

logger = init_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_ADAPTERS = "no adapters are served"
_WEIGHTS = "weights change layout when they are loaded, and can be changed by reload_weights alone"
_CHECKPOINT = "nothing is written: the checkpoint is where it was loaded from"
_RANKS = "which ranks there are is decided when they start"


class Refusals:
    """What our worker has nothing to do for, and what it refuses. `rank` and `parallel_config` are vLLM's."""

    def refuse(self, name: str, why: str) -> None:
        """Raises NotImplementedError, on the last of the ranks that one executor asks.

        It reads their replies in their order, up to the first failure: what came behind it would be taken for the reply
        to its next call. An external launcher has an executor for each rank.
        """
        parallel = self.parallel_config
        alone = parallel.distributed_executor_backend == "external_launcher"
        if alone or self.rank == parallel.world_size - 1:
            raise NotImplementedError(f"specpaged's worker refuses {name}: {why}")

    def sleep(self, level: int = 1) -> None:
        """vLLM lets requests wait until `wake_up`. A refusal would leave them waiting, too, and say otherwise."""
        logger.warning("asleep at level %s: requests wait, and all memory stays where it is", level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Nothing was given away in `sleep`."""

    def discard(self, tags: SequenceOf[str]) -> None:
        """As `sleep`."""
        logger.warning("memory of %s was to be given back, and stays where it is", ", ".join(tags))

    def list_loras(self) -> set[int]:
        """No adapters are served."""
        return set()

    def shutdown_weight_transfer_engine(self) -> None:
        """None was started."""

    def get_kv_connector_handshake_metadata(self) -> None:
        """KV stays here."""

    def get_simple_cpu_offload_num_cpu_blocks(self) -> None:
        """KV stays here. vLLM asks from 0.33 on."""

    def get_encoder_timing_stats(self) -> dict[str, dict[str, float]]:
        """No model that is served has an encoder."""
        return {}

    def execute_dummy_batch(self) -> None:
        """Beside engines that decode, of a model with experts: ours do not wait for each other."""

    def reset_mm_cache(self) -> None:
        """No model that is served takes images or sound: nothing of them is cached."""

    def reset_encoder_cache(self) -> None:
        """No model that is served has an encoder: nothing of one is cached."""


def _refused(name: str, why: str) -> Callable[..., None]:
    def call(self: Refusals, *_arguments: Any, **_options: Any) -> None:
        self.refuse(name, why)

    call.__name__ = name
    call.__doc__ = f"Refused: {why}."
    return call


for _name, _why in {
    "profile": "the metric specpaged:stage_seconds_total says where time goes",
    "add_lora": _ADAPTERS,
    "remove_lora": _ADAPTERS,
    "pin_lora": _ADAPTERS,
    "init_weight_transfer_engine": _WEIGHTS,
    "start_weight_update": _WEIGHTS,
    "start_draft_weight_update": _WEIGHTS,
    "update_weights": _WEIGHTS,
    "finish_weight_update": _WEIGHTS,
    "reset_weights": _WEIGHTS,
    "compute_weight_checksums": _WEIGHTS,
    "update_config": "the configuration is read once, when the worker starts",
    "save_sharded_state": _CHECKPOINT,
    "save_tensorized_model": _CHECKPOINT,
    "checkpoint_prepare": "a process that serves is not checkpointed",
    "checkpoint_restore": "a process that serves is not checkpointed",
    "handle_ft_command": _RANKS,
    "elastic_ep_execute": _RANKS,
    "reinitialize_distributed": _RANKS,
}.items():
    setattr(Refusals, _name, _refused(_name, _why))


def while_starting(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """A worker's method that vLLM calls until the worker has its KV caches. Afterwards it is refused."""

    @functools.wraps(method)
    def call(self: Any, *arguments: P.args, **options: P.kwargs) -> R:
        if self.model_runner is not None:
            return self.refuse(method.__name__, "it belongs to the start, and the worker has started")
        return method(self, *arguments, **options)

    return call
