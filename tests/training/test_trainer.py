"""A run that is cut and resumed ends with the weights of one that was not; the schedule is as described."""

import itertools

import numpy as np
import pytest
import torch

from specpaged.training.target import make_model, next_token_loss
from specpaged.training.trainer import learning_rate_factor, train

STEPS = 9


class Tokenizer:
    eos_token_id = 0

    def __len__(self):
        return 64


def toy_model():
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    return make_model(Tokenizer(), intermediate_size=32, **shape)


def run(checkpoint, cut_at=None):
    """STEPS steps of one tick each; the power fails before step `cut_at`."""

    def microbatches(step, progress):
        if step == cut_at:
            raise KeyboardInterrupt
        rows = np.random.default_rng(step).integers(64, size=(4, 9))
        return list(torch.from_numpy(rows).split(1))

    model = toy_model()
    clock = map(float, itertools.count()).__next__
    position = train(model, next_token_loss, microbatches, checkpoint, STEPS, save_every=3, clock=clock)
    assert position["step"] == STEPS
    return dict(model.named_parameters())


def test_resumed_run_equals_uninterrupted_run(tmp_path):
    expected = run(tmp_path / "whole.safetensors")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut.safetensors", cut_at=5)
    assert (tmp_path / "cut.safetensors").exists()
    resumed = run(tmp_path / "cut.safetensors")
    start = dict(toy_model().named_parameters())
    for name, weight in expected.items():
        assert torch.equal(resumed[name], weight), name
        assert not torch.equal(start[name], weight), name


def test_schedule_warms_up_holds_and_decays_to_zero():
    factors = [learning_rate_factor(i / 100) for i in range(101)]
    assert 0 < factors[0] < 0.1
    assert set(factors[2:65]) == {1.0}
    assert factors[65:] == sorted(factors[65:], reverse=True)
    assert factors[100] == 0
