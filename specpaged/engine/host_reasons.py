"""What keeps rounds from the device, by name: for good, or while somebody runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specpaged.drafting.draft_model import DraftModelDrafter
from specpaged.paging.page_table import TARGET
from specpaged_kernels.limits import MAX_ROWS
from specpaged_kernels.pack import BLOCKS

if TYPE_CHECKING:
    from specpaged.config import EngineConfig
    from specpaged.engine.engine import Engine
    from specpaged.engine.sequence import Sequence
    from specpaged.engine.step import SpeculativeStep
    from specpaged.modeling.model_runner import ModelRunner
    from specpaged.sampling.request import SamplingRequest


def decodes(sequence: Sequence) -> bool:
    """Whether its last known token is the only one without KV."""
    return len(sequence.token_ids) - sequence.page_table.context_lens[TARGET] == 1


def why_not(sequence: Sequence) -> str | None:
    """Why the rounds of a sequence that decodes are the host's."""
    request: SamplingRequest = sequence.sampling_request
    params = request.params
    if params.logprobs is not None:
        return "logprobs"
    if request.edits_tokens(len(request.output_token_ids)) or params.min_p > 0 or params.top_k > 0 or params.top_p < 1:
        return "processing"  # of logits by more than a temperature
    return None


def why_never(engine: Engine) -> str | None:
    """Why all steps of an engine are the host's."""
    reason = why_no_rounds(engine.config, engine.speculative_step, engine.draft, engine.max_draft_tokens)
    if reason is None and engine.draft is not None and engine.kv_layout.num_shared_pools == 1:
        return "blocks of the draft's own"
    return reason


def why_no_rounds(
    config: EngineConfig, step: SpeculativeStep, draft: ModelRunner | None, max_draft_tokens: int
) -> str | None:
    """Why no round of such steps can be the device's, whoever the host is."""
    drafter = step.drafter
    if not (drafter is None or isinstance(drafter, DraftModelDrafter)):
        return "drafter"
    for runner in (step.target, draft):
        if runner is not None and (runner.model.backend != "triton" or runner.model.implementation != "flat"):
            return "models"
    if draft is not None and draft.model.device != step.target.model.device:
        return "devices"
    if config.schedule != "continuous" or config.rollback != "truncate":
        return "schedule"
    if config.max_num_seqs > BLOCKS[-1]:
        return "max_num_seqs"
    if drafter is None:
        return None
    if step.verifier.name == "rejection":
        return "rejection"
    return "K" if max_draft_tokens >= MAX_ROWS else None
