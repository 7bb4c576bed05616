"""Drafters: who proposes tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specpaged.config import EngineConfig
    from specpaged.drafting.base import Drafter
    from specpaged.drafting.draft_model import DraftModelDrafter
    from specpaged.drafting.heads import HeadsDrafter
    from specpaged.drafting.lookup import LookupDrafter
    from specpaged.modeling.model_runner import ModelRunner
    from specpaged.speculative_config import SpeculativeConfig


def require_drafter(config: SpeculativeConfig | None) -> None:
    """ValueError where the configuration names a class that cannot be imported: said before a model is loaded."""
    if config is not None and config.method == "custom":
        from specpaged.drafting.custom import find_drafter

        find_drafter(config.drafter)


def get_drafter(
    engine_config: EngineConfig,
    target: ModelRunner,
    draft: ModelRunner | None,
    vocab_size: int,
    max_num_batched_tokens: int,
) -> Drafter | None:
    """The drafter of a configuration; None where nothing is drafted. `draft` is its model, if its method has one.

    Raises:
        ValueError: it cannot be made; the message names the argument, its value and what is allowed.
    """
    config = engine_config.speculative_config
    if config is None or config.max_draft_tokens == 0:
        return None
    if config.method == "custom":
        from specpaged.drafting.custom import DrafterContext, load_drafter

        return load_drafter(config, DrafterContext.of(engine_config, target, vocab_size), target)
    lookups = [_lookup(config, method) for method in config.lookups]
    model = None if config.model_method is None else _model(config, draft, vocab_size, max_num_batched_tokens)
    if len(config.methods) == 1:
        return lookups[0] if model is None else model
    from specpaged.drafting.combined import CombinedDrafter

    return CombinedDrafter(lookups, model)


def _lookup(config: SpeculativeConfig, method: str) -> LookupDrafter:
    if method == "ngram":
        from specpaged.drafting.ngram import NgramDrafter

        return NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
    from specpaged.drafting.suffix import SuffixDrafter

    return SuffixDrafter(
        config.suffix_decoding_max_tree_depth,
        config.suffix_decoding_max_cached_requests,
        config.suffix_decoding_max_spec_factor,
        config.suffix_decoding_min_token_prob,
    )


def _model(
    config: SpeculativeConfig, draft: ModelRunner, vocab_size: int, max_num_batched_tokens: int
) -> DraftModelDrafter | HeadsDrafter:
    with_probs = config.verification == "rejection"
    if config.reads_target:
        from specpaged.drafting.heads import HeadsDrafter

        return HeadsDrafter(draft, vocab_size, with_probs)
    from specpaged.drafting.draft_model import DraftModelDrafter

    return DraftModelDrafter(draft, vocab_size, max_num_batched_tokens, with_probs)
