"""EAGLE-3 unrolled over all rows at once, against one row at a time in plain words."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from specpaged.training.heads.batches import Batch
from specpaged.training.heads.eagle3 import aux_layer_ids
from tests.training.heads.conftest import random_heads, random_text


def norm(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rope(x, position, theta):
    """x [heads, D] at one position."""
    half = x.shape[1] // 2
    out = torch.empty_like(x)
    for i in range(half):
        angle = torch.tensor(position * theta ** (-2 * i / x.shape[1]))
        a, b = x[:, i], x[:, i + half]
        out[:, i] = a * angle.cos() - b * angle.sin()
        out[:, i + half] = b * angle.cos() + a * angle.sin()
    return out


def chain(heads, features, embeddings, position, steps):
    """States of `steps` drafts behind row `position`, with a growing cache, as one sequence drafts them.

    `features` [T, 3 d] are the target's, `embeddings(i)` the embedding of token i.
    """
    weights, shape = dict(heads.named_parameters()), heads.shape
    eps, group = shape.rms_norm_eps, shape.num_attention_heads // shape.num_key_value_heads
    cache, states, g = [], [], None
    for place in range(position + steps):
        g = weights["fc.weight"] @ features[place] if place <= position else g
        x = torch.cat([
            norm(embeddings(place + 1), weights["midlayer.input_layernorm.weight"], eps),
            norm(g, weights["midlayer.hidden_norm.weight"], eps),
        ])  # fmt: skip
        query, key, value = (
            (weights[f"midlayer.self_attn.{name}_proj.weight"] @ x).view(-1, shape.head_dim) for name in "qkv"
        )
        cache.append((rope(key, place, shape.rope_theta), value))
        query = rope(query, place, shape.rope_theta)
        attended = []
        for head in range(shape.num_attention_heads):
            keys = torch.stack([k[head // group] for k, _ in cache])
            values = torch.stack([v[head // group] for _, v in cache])
            attended.append((keys @ query[head] / shape.head_dim**0.5).softmax(0) @ values)
        h = g + weights["midlayer.self_attn.o_proj.weight"] @ torch.cat(attended)
        y = norm(h, weights["midlayer.post_attention_layernorm.weight"], eps)
        gate, up, down = (weights[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        g = h + down @ (F.silu(gate @ y) * (up @ y))
        if place >= position:
            states.append(norm(g, weights["norm.weight"], eps))
    return torch.stack(states)


@pytest.mark.parametrize("first_row", [0, 2])
@torch.no_grad()
def test_unrolled_rows_equal_sequences_that_draft_with_a_cache(frozen, first_row):
    heads = random_heads("eagle3", frozen)
    batch = Batch.of(random_text([(4, 9), (3, 6)]), heads, frozen)

    def input_embedding(step):
        tokens = batch.shifted(1 + step)
        return frozen.embed(tokens[:, first_row:] if step else tokens)

    unrolled = torch.stack(list(heads.unroll(batch.hidden, input_embedding, 4, first_row)), 2)
    features = torch.cat(batch.hidden.layer_inputs, -1)
    for b, length in enumerate(batch.lengths.tolist()):
        tokens = batch.token_ids[b]
        for position in range(first_row, length - 4):
            expected = chain(heads, features[b], lambda i, tokens=tokens: frozen.embed(tokens[i]), position, 4)
            torch.testing.assert_close(unrolled[b, position - first_row], expected, rtol=1e-3, atol=1e-4)


def test_layers_are_the_published_ones_or_the_nearest_distinct():
    assert aux_layer_ids(32) == (2, 16, 29)
    assert aux_layer_ids(8) == (2, 4, 7)
    for num_layers in range(1, 40):
        ids = aux_layer_ids(num_layers)
        assert list(ids) == sorted(ids)
        assert ids[0] >= 0
        assert ids[-1] < num_layers
        assert len(set(ids)) == min(3, num_layers)


def test_token_ids_go_through_the_draft_vocabulary(frozen):
    heads = random_heads("eagle3", frozen, vocab_size=40)
    vocabulary = heads.t2d.nonzero().squeeze(1)
    assert len(vocabulary) == 40
    logits = torch.eye(40)
    assert heads.token_ids(logits).tolist() == vocabulary.tolist()
