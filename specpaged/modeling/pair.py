"""A target and its draft, loaded for one configuration, and made to run on their KV caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from specpaged.config import EngineConfig
from specpaged.modeling import freed_memory
from specpaged.modeling.cuda_graphs import CudaGraphs, Record
from specpaged.modeling.heads.loading import heads_config_dict, load_heads
from specpaged.modeling.loaded_model import LoadedModel
from specpaged.modeling.loading import load_model, load_tokenizer
from specpaged.modeling.model_runner import ModelRunner
from specpaged.modeling.rank_agreement import RankAgreement
from specpaged.modeling.shard import Shard
from specpaged.paging.kv_cache import KVCache


@dataclass(frozen=True)
class ModelPair:
    """The models of an engine, draft or not, and the tokens that they have in common."""

    target: LoadedModel
    draft: LoadedModel | None
    tokenizer: PreTrainedTokenizerBase | None
    vocab_size: int  # token ids that may be sampled: 0 .. vocab_size - 1

    @classmethod
    def load(cls, config: EngineConfig, shard: Shard | None = None) -> ModelPair:
        """The models that a configuration names; the draft's only if there is a batch size that drafts with one.

        With a shard, its part of the target; the draft is whole on every rank.

        Raises:
            ValueError: for a checkpoint that cannot be loaded or served, or a pair whose vocabularies differ.
        """
        speculative = config.speculative_config
        if speculative is not None and speculative.has_model and speculative.reads_target:
            heads_config_dict(speculative.model)  # to be refused before the target is read
        target = load_model(
            config.model,
            dtype=config.dtype,
            kv_cache_dtype=config.kv_cache_dtype,
            max_model_len=config.max_model_len,
            numerics=config.numerics,
            shard=shard,
            **_shared_arguments(config),
        )
        tokenizer = load_tokenizer(config.model, config.trust_remote_code)
        vocab_size = target.vocab_size
        if tokenizer is not None:  # whose ids may have gaps; an embedding may be padded beyond them
            vocab_size = min(vocab_size, 1 + max(tokenizer.get_vocab().values()))
        draft = None
        if speculative is not None and speculative.has_model:
            if speculative.reads_target:
                draft = _load_heads(config, target)
            else:
                draft = _load_draft(config, target, tokenizer, vocab_size)
        freed_memory.give_back()
        return cls(target, draft, tokenizer, vocab_size)

    @property
    def models(self) -> list[LoadedModel]:
        """The models in the order of their pools: the target, then the draft if there is one."""
        return [self.target] if self.draft is None else [self.target, self.draft]

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The target's end-of-text tokens, but for ids without logits: none of those can end a sequence."""
        return tuple(token_id for token_id in self.target.eos_token_ids if 0 <= token_id < self.vocab_size)

    def runners(
        self,
        kv_caches: Sequence[KVCache],
        max_model_len: int,
        enforce_eager: bool,
        record: Record | None = None,
        agreement: RankAgreement | None = None,
    ) -> list[ModelRunner]:
        """A runner for each model on its KV cache, with CUDA graphs where passes can be captured and may be.

        Of a target that is spread over ranks, `record` captures passes, and `agreement` says whether all of them have.
        """
        runners = []
        for model, cache in zip(self.models, kv_caches, strict=True):
            graphs = None
            if CudaGraphs.why_not(model, enforce_eager) is None:
                of_ranks = (record, agreement) if model is self.target else ()  # the draft is whole on every rank
                graphs = CudaGraphs(model, cache, max_model_len, *of_ranks)
            runners.append(ModelRunner(model, cache, graphs))
        return runners


def _shared_arguments(config: EngineConfig) -> dict[str, Any]:
    """The arguments that both models are loaded with."""
    names = ("device", "trust_remote_code", "attention_backend", "model_impl", "block_size")
    return {name: getattr(config, name) for name in names}


def _load_heads(config: EngineConfig, target: LoadedModel) -> LoadedModel:
    speculative = config.speculative_config
    return load_heads(
        speculative.model,
        speculative.model_method,
        target,
        kv_cache_dtype=speculative.kv_cache_dtype,
        numerics=speculative.numerics,
        attention_backend=config.attention_backend,
        block_size=config.block_size,
    )


def _load_draft(
    config: EngineConfig, target: LoadedModel, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int
) -> LoadedModel:
    speculative = config.speculative_config
    elsewhere = {} if speculative.device is None else {"device": speculative.device}
    draft = load_model(
        speculative.model,
        dtype=str(target.dtype).removeprefix("torch."),
        kv_cache_dtype=speculative.kv_cache_dtype,
        max_model_len=target.max_model_len,
        numerics=speculative.numerics,
        **_shared_arguments(config) | elsewhere,
    )
    draft_tokenizer = load_tokenizer(speculative.model, config.trust_remote_code)
    if tokenizer is not None and draft_tokenizer is not None:
        same = tokenizer.get_vocab() == draft_tokenizer.get_vocab()
        sizes = f"{len(draft_tokenizer)} and {len(tokenizer)} tokens"
    else:
        same = draft.vocab_size == target.vocab_size
        sizes = f"{draft.vocab_size} and {target.vocab_size} embedding rows"
    if not same:
        raise ValueError(
            f"speculative_config['model']={speculative.model!r} has another vocabulary than "
            f"model={config.model!r} ({sizes}); allowed: a draft with the target's own tokenizer"
        )
    if draft.vocab_size < vocab_size:
        raise ValueError(
            f"speculative_config['model']={speculative.model!r} has {draft.vocab_size} embedding rows for the "
            f"target's {vocab_size} tokens; allowed: as many or more"
        )
    return draft
