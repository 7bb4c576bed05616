"""A run that is cut and resumed ends with the weights, bit for bit, of one that was not; and heads learn."""

from __future__ import annotations

import pytest
import torch

from specpaged.training.heads.budget import Budget
from specpaged.training.heads.head_checkpoint import load_heads, save_heads
from specpaged.training.heads.target import KEPT_BYTES, FrozenTarget
from specpaged.training.heads.trainer import Progress, Settings, Trainer
from specpaged.training.heads.vocabulary import draft_vocabulary
from tests.training.heads.conftest import random_heads, random_text

STEPS = 6


def run(method, frozen, checkpoint, cut_at=None, steps=STEPS):
    text = random_text([(3 + i % 4, 9 + i % 5) for i in range(12)])
    settings = Settings(batch_size=4, learning_rate=1e-2, seed=0, threads=1, save_every=0.0)
    trainer = Trainer(
        random_heads(method, frozen), frozen, text[2:], text[:2], Budget(steps, None), settings, checkpoint
    )

    def show(share, line):
        if trainer.position["step"] == cut_at:
            raise KeyboardInterrupt

    trainer.run(Progress(show=show))
    return trainer


@pytest.mark.parametrize("method", ["eagle3", "clover"])
def test_a_resumed_run_equals_an_uninterrupted_one(frozen, tmp_path, method):
    whole = run(method, frozen, tmp_path / "whole.safetensors")
    with pytest.raises(KeyboardInterrupt):
        run(method, frozen, tmp_path / "cut.safetensors", cut_at=4)
    has_kept_nothing = FrozenTarget(frozen.loaded, KEPT_BYTES)
    resumed = run(method, has_kept_nothing, tmp_path / "cut.safetensors")
    start = dict(random_heads(method, frozen).named_parameters())
    for name, weight in whole.heads.named_parameters():
        assert torch.equal(dict(resumed.heads.named_parameters())[name], weight), name
        assert not torch.equal(start[name], weight), name
    assert resumed.position["curve"] == whole.position["curve"]


def test_the_loss_falls(frozen, tmp_path, heads):
    trainer = run(heads.method, frozen, tmp_path / "run.safetensors", steps=24)
    losses = [point["loss"] for point in trainer.position["curve"] if point["loss"] is not None]
    assert losses[-1] < 0.9 * losses[0]


@torch.no_grad()
def test_heads_read_back_from_their_folder_compute_the_same(frozen, tmp_path, heads):
    save_heads(heads, tmp_path, torch.float32)
    loaded = load_heads(tmp_path)
    hidden = frozen.hidden_states([text.all_token_ids for text in random_text([(4, 6)])], heads.request)
    embedded = torch.randn(1, 10, heads.shape.hidden_size)
    for ours, theirs in zip(*(h.unroll(hidden, lambda step: embedded, 3) for h in (heads, loaded)), strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(heads.token_ids(heads.logits(ours, frozen)), loaded.token_ids(loaded.logits(ours, frozen)))


def test_the_draft_vocabulary_is_what_is_written_most():
    (text,) = random_text([(2, 1)])
    text = type(text)([7, 7, 7], [4, 9, 9, 2, 2, 2, 8])
    assert draft_vocabulary([text], 12, 3).tolist() == [2, 4, 9]
    assert draft_vocabulary([text], 12, 12).tolist() == list(range(12))
