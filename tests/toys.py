"""Toy checkpoints: random weights, real formats."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

VOCAB_SIZE = 300
EOS = 0


@dataclass(frozen=True)
class Pair:
    """Paths of a target and of a draft."""

    target: str
    draft: str


def config(**overrides) -> Qwen3Config:
    """A Qwen3 of two layers."""
    values = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "eos_token_id": EOS,
        "bos_token_id": None,
        "pad_token_id": None,
        "initializer_range": 0.3,
    }
    return Qwen3Config(**(values | overrides))


def model(seed: int = 0, **overrides) -> torch.nn.Module:
    """A model with random weights."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config(**overrides)).eval()


def save_pair(directory: Path, with_tokenizer: bool = False, noise: float = 0.03) -> Pair:
    """A target, and as its draft the same weights with noise on them: it agrees now and then."""
    target = model()
    target.save_pretrained(directory / "target")
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    target.save_pretrained(directory / "draft")
    if with_tokenizer:
        tokenizer = byte_tokenizer()
        for name in ("target", "draft"):
            tokenizer.save_pretrained(directory / name)
    return Pair(str(directory / "target"), str(directory / "draft"))


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of VOCAB_SIZE tokens, trained on a few words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = ["the quick brown fox jumps over the lazy dog", "pages and blocks of the cache", "speculative decoding"]
    tokenizer.train_from_iterator(words * 3, trainer)
    # A few words give fewer merges than asked for: fill up with tokens that never occur.
    tokenizer.add_tokens([f"<unused{i}>" for i in range(VOCAB_SIZE - tokenizer.get_vocab_size())])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def prompts(count: int, seed: int = 0, shortest: int = 3, longest: int = 40) -> list[dict]:
    """Random prompts of ragged lengths, as token ids."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [
        {"prompt_token_ids": torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist()}
        for length in lengths
    ]
