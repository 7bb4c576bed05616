"""Sequences on a paged KV cache, by hand: what the engine does with page tables, without an engine."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from specpaged.modeling.forward_output import ForwardOutput
from specpaged.modeling.loading import LoadedModel
from specpaged.modeling.model_runner import ModelRunner
from specpaged.modeling.ragged_batch import RaggedRow, pack
from specpaged.paging.kv_cache import PagedKVCache


class World:
    """Every pass starts with NaN in all slots whose KV is not valid, but for the null block."""

    def __init__(
        self, model: LoadedModel, block_size: int = 16, num_slots: int = 4096, seed: int = 0, poison: bool = True
    ):
        self.block_size = block_size
        self.cache = PagedKVCache(model.kv_spec, num_slots // block_size, block_size, model.kv_dtype, model.device)
        self.runner = ModelRunner(model, self.cache)
        self.free = list(range(1, num_slots // block_size + 1))
        random.Random(seed).shuffle(self.free)
        self.blocks: dict[str, list[int]] = {}
        self.context: dict[str, int] = {}
        self.poison = poison

    def truncate(self, name: str, context_len: int) -> None:
        self.context[name] = context_len
        keep = -(-context_len // self.block_size)
        self.free += self.blocks[name][keep:]
        del self.blocks[name][keep:]

    def owned_slots(self) -> list[int]:
        return [
            self.blocks[name][p // self.block_size] * self.block_size + p % self.block_size
            for name, length in self.context.items()
            for p in range(length)
        ]

    def run(self, *rows: tuple[str, list[int], int]) -> dict[str, Tensor]:
        """(name, token ids, number of logits) per sequence, in order; returns each one's logits [num_logits, V]."""
        logits = self.forward(*rows).logits
        return dict(zip([name for name, *_ in rows], logits.split([row[2] for row in rows]), strict=True))

    def forward(self, *rows: tuple, **options: object) -> ForwardOutput:
        """(name, token ids, number of logits, number of hidden states or nothing) per sequence, in one pass."""
        packed = []
        for name, tokens, *wanted in rows:
            blocks = self.blocks.setdefault(name, [])
            context = self.context.setdefault(name, 0)
            while len(blocks) * self.block_size < context + len(tokens):
                blocks.append(self.free.pop())
            packed.append(RaggedRow(tokens, context, list(blocks), *wanted))
        if self.poison:
            self.cache.fill_unowned(self.owned_slots())
        output = self.runner.forward(pack(packed, self.block_size), **options)
        for name, tokens, *_ in rows:
            self.context[name] += len(tokens)
        return output


def random_tokens(count: int, seed: int, vocab: int = 128) -> list[int]:
    return torch.randint(3, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
