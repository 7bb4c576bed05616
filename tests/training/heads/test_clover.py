"""Clover-2 over whole sequences, against one state at a time in plain words."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from specpaged.training.heads.batches import Batch
from specpaged.training.heads.clover import NUM_HEADS, Clover
from specpaged.training.heads.distillation import distillation_loss
from specpaged.training.heads.target import FrozenTarget
from tests.toys import VOCAB_SIZE
from tests.training.heads.conftest import random_heads, random_text
from tests.training.heads.test_eagle3 import norm, rope


def res_attention(weights, prefix, x, embedded, num_heads, eps):
    def linear(name, value):
        return weights[f"{prefix}.{name}.weight"] @ value + weights[f"{prefix}.{name}.bias"]

    query = linear("q", norm(x, weights[f"{prefix}.input_layernorm.weight"], eps))
    key, value = linear("k", embedded), linear("v", embedded)
    out, size = x.clone(), len(x) // num_heads
    for head in range(num_heads):
        part = slice(head * size, (head + 1) * size)
        cosine = query[part] @ key[part] / (max(query[part].norm(), eps) * max(key[part].norm(), eps))
        out[part] += cosine * value[part]
    return out


def layer(weights, prefix, xs, shape):
    """A Llama layer over a list of states."""
    eps, group = shape.rms_norm_eps, shape.num_attention_heads // shape.num_key_value_heads
    cache, out = [], []
    for position, x in enumerate(xs):
        y = norm(x, weights[f"{prefix}.input_layernorm.weight"], eps)
        query, key, value = (
            (weights[f"{prefix}.self_attn.{name}_proj.weight"] @ y).view(-1, shape.head_dim) for name in "qkv"
        )
        query = rope(query, position, shape.rope_theta)
        cache.append((rope(key, position, shape.rope_theta), value))
        attended = []
        for head in range(shape.num_attention_heads):
            keys = torch.stack([k[head // group] for k, _ in cache])
            values = torch.stack([v[head // group] for _, v in cache])
            attended.append((keys @ query[head] / shape.head_dim**0.5).softmax(0) @ values)
        x = x + weights[f"{prefix}.self_attn.o_proj.weight"] @ torch.cat(attended)
        y = norm(x, weights[f"{prefix}.post_attention_layernorm.weight"], eps)
        gate, up, down = (weights[f"{prefix}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        out.append(x + down @ (F.silu(gate @ y) * (up @ y)))
    return out


@torch.no_grad()
def test_heads_equal_a_step_by_step_evaluation(frozen):
    heads = random_heads("clover", frozen)
    batch = Batch.of(random_text([(4, 9), (3, 6)]), heads, frozen)
    unrolled = torch.stack(list(heads.unroll(batch.hidden, lambda s: frozen.embed(batch.shifted(1 + s)), NUM_HEADS)), 2)
    weights, shape, eps = dict(heads.named_parameters()), heads.shape, heads.shape.rms_norm_eps
    for b, length in enumerate(batch.lengths.tolist()):
        embedded = frozen.embed(batch.token_ids[b])
        xs = [
            res_attention(weights, "clover_head_mlp_rnn", batch.hidden.last[b, i], embedded[i + 1], 4, eps)
            for i in range(length - 1)
        ]
        for i in range(2):
            xs = layer(weights, f"layers.{i}", xs, shape)
        for row in range(length - NUM_HEADS):
            h = norm(xs[row], weights["clover_norm.weight"], eps)
            inner = weights["clover_head_mlp.weight"] @ h + weights["clover_head_mlp.bias"]
            expected = [norm(inner, weights["clover_head_norm.weight"], eps)]
            for head in range(1, NUM_HEADS):
                e = embedded[row + 1 + head]
                h = res_attention(weights, "clover_head_mlp_rnn2", h, e, 4, eps)
                inner = weights["clover_head_mlp2.weight"] @ torch.cat([h, e]) + weights["clover_head_mlp2.bias"]
                expected.append(norm(inner, weights["clover_head_norm.weight"], eps))
            torch.testing.assert_close(unrolled[b, row], torch.stack(expected), rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_fresh_heads_hand_on_the_state(frozen):
    heads = Clover.fresh(frozen)
    x = torch.randn(5, heads.shape.hidden_size)
    torch.testing.assert_close(heads.clover_head_mlp(x), x, rtol=0.2, atol=0.3)
    assert torch.equal(heads.clover_head_norm.weight, frozen.final_norm_weight)


def test_layers_begin_as_a_llamas_last_one_and_learn_in_its_dtype(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(tmp_path)
    target = FrozenTarget.load(str(tmp_path), 32, "cpu")
    assert target.loaded.dtype == torch.bfloat16
    heads = Clover.fresh(target)
    last = {name: weight.float() for name, weight in model.model.layers[-1].state_dict().items()}
    for layer in heads.layers:
        assert all(torch.equal(weight, last[name]) for name, weight in layer.state_dict().items())
    (part,) = Batch.of(random_text([(4, 9)]), heads, target).microbatches(1, NUM_HEADS, heads.decay)
    loss = distillation_loss(heads, target, part)
    gradients = torch.autograd.grad(loss, list(heads.parameters()))
    assert loss > 0
    assert all(gradient.isfinite().all() for gradient in gradients)
