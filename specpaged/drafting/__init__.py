"""Drafters: who proposes tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specpaged.drafting.base import Drafter
    from specpaged.modeling.model_runner import ModelRunner
    from specpaged.speculative_config import SpeculativeConfig


def get_drafter(
    config: SpeculativeConfig | None, draft: ModelRunner | None, vocab_size: int, max_num_batched_tokens: int
) -> Drafter | None:
    """The drafter of a configuration; None where nothing is drafted. `draft` is its model, if its method has one."""
    if config is None or config.max_draft_tokens == 0:
        return None
    if config.method == "ngram":
        from specpaged.drafting.ngram import NgramDrafter

        return NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
    from specpaged.drafting.draft_model import DraftModelDrafter

    return DraftModelDrafter(draft, vocab_size, max_num_batched_tokens, with_probs=config.verification == "rejection")
