"""Which engine serves a configuration."""

from __future__ import annotations

from collections.abc import Sequence

from specpaged.config import BY_HALVES, EngineConfig
from specpaged.engine.engine import Engine
from specpaged.engine.overlap_engine import OverlapEngine
from specpaged.modeling.loaded_model import LoadedModel


def engine_class(config: EngineConfig, models: Sequence[LoadedModel]) -> type[Engine]:
    """The class of the engine that a configuration asks for, of a target and perhaps a draft.

    Raises:
        ValueError: the target's passes cannot be those of a device's own round.
    """
    if config.schedule in BY_HALVES:
        return OverlapEngine
    if not config.device_round:
        return Engine
    check_device_round(models[0])
    from specpaged.engine.device_engine import DeviceEngine  # where it is wanted: defining kernels takes seconds

    return DeviceEngine


def check_device_round(target: LoadedModel) -> None:
    """ValueError where the target's passes cannot be those of a device's own round."""
    if target.implementation != "flat" or target.backend != "triton":
        raise ValueError(
            f"device_round=True needs the flat decoder on Triton's kernels; {target.name} runs as "
            f"{target.implementation!r} on {target.backend!r}; allowed here: device_round=False"
        )
