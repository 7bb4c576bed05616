"""A toy target, frozen, and text that it did not write."""

from __future__ import annotations

import pytest
import torch

from specpaged.training.heads.clover import Clover
from specpaged.training.heads.continuations import Continuation
from specpaged.training.heads.eagle3 import Eagle3
from specpaged.training.heads.target import FrozenTarget
from tests.toys import VOCAB_SIZE


@pytest.fixture(scope="session")
def frozen(toy_pair):
    return FrozenTarget.load(toy_pair.target, 64, "cpu")


@pytest.fixture(params=["eagle3", "clover"])
def heads(request, frozen):
    """Heads whose every weight is random, biases and norms too."""
    return random_heads(request.param, frozen)


def random_heads(method, frozen, vocab_size=VOCAB_SIZE):
    torch.manual_seed(5)
    vocabulary = torch.randperm(VOCAB_SIZE)[:vocab_size].sort().values
    heads = Eagle3.fresh(frozen, vocabulary, [[1, 2, 3]]) if method == "eagle3" else Clover.fresh(frozen)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return heads


def random_text(lengths, seed=0):
    """Continuations of (prompt, continuation) lengths, of random tokens."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count):
        return torch.randint(1, VOCAB_SIZE, (count,), generator=generator).tolist()

    return [Continuation(tokens(prompt), tokens(rest)) for prompt, rest in lengths]
