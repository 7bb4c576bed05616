"""The frozen target's hidden states and ends, against transformers' own."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from specpaged.modeling.forward_output import HiddenStatesRequest
from specpaged.training.heads import target as module
from specpaged.training.heads.target import FrozenTarget, check_target
from tests.training.heads.conftest import random_text


@pytest.mark.parametrize("tokens_per_pass", [8192, 20])
@torch.no_grad()
def test_hidden_states_and_logits_are_the_models_own(toy_pair, frozen, monkeypatch, tokens_per_pass):
    monkeypatch.setattr(module, "TOKENS_PER_PASS", tokens_per_pass)
    sequences = [text.all_token_ids for text in random_text([(5, 12), (2, 3), (4, 20)])]
    frozen = FrozenTarget(frozen.loaded)  # which keeps none, so that sequences may share a pass
    hidden = frozen.hidden_states(sequences, HiddenStatesRequest(last=True, layer_inputs=(0, 1)))
    model = AutoModelForCausalLM.from_pretrained(toy_pair.target, dtype=torch.float32)
    residual = {}
    model.model.norm.register_forward_pre_hook(lambda _, inputs: residual.update(last=inputs[0]))
    for b, tokens in enumerate(sequences):
        outputs = model(torch.tensor([tokens]), output_hidden_states=True)
        length = len(tokens)
        for ours, theirs in zip(hidden.layer_inputs, outputs.hidden_states[:2], strict=True):
            torch.testing.assert_close(ours[b, :length], theirs[0], rtol=1e-3, atol=1e-3)
            assert not ours[b, length:].any()
        torch.testing.assert_close(hidden.last[b, :length], residual["last"][0], rtol=1e-3, atol=1e-3)
        logits = frozen.logits(frozen.final_norm(hidden.last[b, :length]))
        torch.testing.assert_close(logits, outputs.logits[0], rtol=1e-3, atol=1e-2)
        torch.testing.assert_close(frozen.embed(torch.tensor(tokens)), outputs.hidden_states[0][0])


def test_states_that_are_kept_are_what_a_pass_would_compute_again_and_no_more_than_there_is_room_for(toy_pair):
    sequences = [text.all_token_ids for text in random_text([(5, 12), (2, 3), (4, 20), (9, 30)])]
    request, other = HiddenStatesRequest(last=True, layer_inputs=(1,)), HiddenStatesRequest(last=True)
    passes = []

    class Counting(FrozenTarget):
        def _pass(self, sequences, request):
            passes.extend(len(tokens) for tokens in sequences)
            return super()._pass(sequences, request)

    target = Counting.load(toy_pair.target, 64, "cpu")
    of_token = 2 * target.config.hidden_size * 4  # bytes
    target._room = of_token * (17 + 5 + 20)
    alone = [FrozenTarget(target.loaded).hidden_states([tokens], request) for tokens in sequences]
    for picked, computed in (([0, 1], [17, 5]), ([2, 0], [24]), ([1, 3], [39]), ([2, 3, 1, 2], [24, 39]), ([1, 0], [])):
        del passes[:]
        hidden = target.hidden_states([sequences[i] for i in picked], request)
        assert passes == computed
        for b, i in enumerate(picked):
            for ours, theirs in zip(
                (hidden.last, *hidden.layer_inputs), (alone[i].last, *alone[i].layer_inputs), strict=True
            ):
                torch.testing.assert_close(ours[b, : len(sequences[i])], theirs[0], rtol=0, atol=0)
                assert not ours[b, len(sequences[i]) :].any()
    assert target._room == of_token * 20
    assert not target.hidden_states(sequences[:1], other).layer_inputs
    assert passes == [17]


def test_a_family_that_scales_is_scaled(tmp_path):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=60, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64, final_logit_softcapping=2.0,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    frozen = FrozenTarget.load(str(tmp_path), 32, "cpu")
    tokens = [3, 5, 8, 13, 21]
    with torch.no_grad():
        outputs = model(torch.tensor([tokens]), output_hidden_states=True)
        last = frozen.hidden_states([tokens], HiddenStatesRequest(last=True)).last
        torch.testing.assert_close(frozen.logits(frozen.final_norm(last)), outputs.logits, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(frozen.embed(torch.tensor([tokens])), outputs.hidden_states[0])


def test_lengths_are_checked_against_the_target(toy_pair):
    assert check_target(toy_pair.target, None) == 256
    assert check_target(toy_pair.target, 512) == 512
    with pytest.raises(ValueError, match=r"--sequence-length=513 .* 512 positions"):
        check_target(toy_pair.target, 513)
