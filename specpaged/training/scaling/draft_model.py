"""A fresh draft of some shape for a target."""

from __future__ import annotations

import torch

from specpaged.training.heads.target import FrozenTarget
from specpaged.training.scaling.shape import DraftShape


def fresh_draft(shape: DraftShape, target: FrozenTarget, seed: int) -> torch.nn.Module:
    """A `Qwen3ForCausalLM` in float32 whose embedding is the target's, projected on its main directions.

    What a wider draft has beyond the target's width stays as transformers draws it.
    """
    from transformers import Qwen3ForCausalLM

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        draft = Qwen3ForCausalLM(shape.config(target.loaded.hf_config)).float()
        embedding = target.embed(torch.arange(target.config.vocab_size, device=target.device)).cpu()
        _, directions = torch.linalg.eigh(embedding.mT @ embedding)  # ascending
        width = min(shape.hidden_size, embedding.shape[1])
        main = directions.flip(1)[:, :width]
        draft.get_input_embeddings().weight[:, :width].copy_(embedding @ main)
    return draft.train()
