"""Which engine serves a configuration."""

from __future__ import annotations

from collections.abc import Sequence

from specpaged.config import EngineConfig
from specpaged.engine.engine import Engine
from specpaged.modeling.loaded_model import LoadedModel


def engine_class(config: EngineConfig, models: Sequence[LoadedModel]) -> type[Engine]:
    """The class of the engine that a configuration asks for.

    Raises:
        ValueError: the passes of one of the models cannot be a round of the device's own.
    """
    if not config.device_round:
        return Engine
    for model in models:
        if model.implementation != "flat" or model.backend != "triton":
            raise ValueError(
                f"device_round=True needs the flat decoder on Triton's kernels; {model.name} runs as "
                f"{model.implementation!r} on {model.backend!r}; allowed here: device_round=False"
            )
    from specpaged.engine.device_engine import DeviceEngine  # where it is wanted: defining kernels takes seconds

    return DeviceEngine
