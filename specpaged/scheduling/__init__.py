"""Which sequences run in a step (ints only)."""

from __future__ import annotations

from typing import Any

from specpaged.config import EngineConfig
from specpaged.scheduling.continuous import ContinuousScheduler
from specpaged.scheduling.eqspec import EqspecScheduler
from specpaged.scheduling.exspec import ExspecScheduler


def get_scheduler(config: EngineConfig, *arguments: Any, **options: Any) -> ContinuousScheduler:
    """The scheduler that the configuration names; the arguments are ContinuousScheduler's."""
    if config.schedule == "exspec":
        window = {"window": config.num_residents, "sort_by_length": config.sort_by_length}
        return ExspecScheduler(*arguments, **options, **window)
    return {"continuous": ContinuousScheduler, "eqspec": EqspecScheduler}[config.schedule](*arguments, **options)
