"""Whether a worker's rounds are the device's: where they are asked for, and can be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logger import init_logger

from specpaged.drafting.draft_model import DraftModelDrafter
from specpaged.engine.build import check_device_round

if TYPE_CHECKING:
    from specpaged.config import EngineConfig
    from specpaged.engine.step import SpeculativeStep
    from specpaged.vllm_plugin.device_rounds import DeviceRounds
    from specpaged.vllm_plugin.sequences import Sequences

logger = init_logger(__name__)


def get_rounds(
    config: EngineConfig, step: SpeculativeStep, sequences: Sequences, before: DeviceRounds | None = None
) -> DeviceRounds | None:
    """The rounds of these sequences that are the device's; None where all steps are the host's.

    `before` are those of other weights: the one in flight is committed.

    Raises:
        ValueError: they are asked for, and the target's passes cannot be those of a round.
    """
    if not config.device_round:
        return None
    check_device_round(step.target.model)
    from specpaged.engine.host_reasons import why_no_rounds  # where they are wanted: defining kernels takes seconds
    from specpaged.vllm_plugin.device_rounds import DeviceRounds

    draft = step.drafter.runner if isinstance(step.drafter, DraftModelDrafter) else None
    # Each rank would run the draft by itself, and they have to agree on its tokens.
    reason = "ranks" if step.agree is not None else why_no_rounds(config, step, draft, sequences.max_draft_tokens)
    if reason is not None:
        logger.warning("device_round=True, and all steps are the host's all the same: %s", reason)
        return None
    if before is not None:
        before.land()
    return DeviceRounds(config, step, sequences, draft)
