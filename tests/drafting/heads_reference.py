"""What a head drafts, said as plainly as possible: no KV, no pages, no batch.

A draft of one sequence recomputes all of it, with one row more for each draft token. Nothing here is shared with
`specpaged`: configurations and weights are read from the checkpoint's files, and the target is transformers'.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F


class ReferenceDrafts(NamedTuple):
    """Greedy drafts, and for each how clear it was."""

    token_ids: list[int]  # target token ids
    runners_up: list[int]  # the second most likely
    margins: list[float]  # logit of the first, less that of the second

    def differs_at(self, token_ids: Sequence[int]) -> int | None:
        """The first of `token_ids` that is another than here; None where there is none."""
        pairs = enumerate(zip(self.token_ids, token_ids, strict=False))
        return next((i for i, (ours, theirs) in pairs if ours != theirs), None)


@torch.no_grad()
def residual_streams(target: nn.Module, token_ids: Sequence[int]) -> list[Tensor]:
    """[T, H] each: what enters layer 0, layer 1, ..., and last what the final norm reads."""
    before_norm = []
    handle = target.model.norm.register_forward_pre_hook(lambda module, inputs: before_norm.append(inputs[0]))
    try:
        output = target(torch.tensor([list(token_ids)]), output_hidden_states=True, use_cache=False)
    finally:
        handle.remove()
    # transformers' last entry has been through the final norm.
    return [states[0] for states in (*output.hidden_states[:-1], before_norm[0])]


@torch.no_grad()
def eagle3_reference(
    checkpoint_dir: str | Path, target: nn.Module, token_ids: Sequence[int], num_drafts: int
) -> ReferenceDrafts:
    """What an EAGLE-3 head of `checkpoint_dir` drafts behind the known `token_ids`, of which the target has not run the
    newest one: `target` is a causal language model of transformers in fp32. Both spellings.

    The features of position i are paired with token i + 1, at position i of the rotary embedding.
    """
    return Eagle3Reference(checkpoint_dir, target).drafts(residual_streams(target, token_ids), token_ids, num_drafts)


@torch.no_grad()
def clover_reference(
    checkpoint_dir: str | Path, target: nn.Module, token_ids: Sequence[int], num_drafts: int
) -> ReferenceDrafts:
    """What a Clover-2 head of `checkpoint_dir` drafts behind the known `token_ids`, of which the target has not run the
    newest one. The last hidden state of position i is paired with token i + 1, at position i of the rotary embedding.
    """
    return CloverReference(checkpoint_dir, target).drafts(residual_streams(target, token_ids), token_ids, num_drafts)


class Eagle3Reference:
    """An EAGLE-3 checkpoint in either spelling."""

    def __init__(self, checkpoint_dir: str | Path, target: nn.Module):
        written, self.weights = _read(checkpoint_dir)
        self.weights = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in self.weights.items()}
        is_speculators = "speculators_model_type" in written
        nested = written.get("eagle_config") or {}
        settings = written | nested
        self.config = written["transformer_layer_config"] if is_speculators else written
        num_layers = target.config.num_hidden_layers
        default_taps = (2, num_layers // 2, num_layers - 3)
        # In the order of the layers, in whatever order they are named: vLLM collects them on the way up.
        self.taps = sorted(settings.get("eagle_aux_hidden_state_layer_ids") or default_taps)
        self.norm_before_residual = settings.get("norm_before_residual", is_speculators)
        self.norm_before_fc = settings.get("norm_before_fc", False)
        self.fc_norm = settings.get("fc_norm", False)
        self.norm_output = settings.get("norm_output", False)
        self.eps = self.config["rms_norm_eps"]
        self.embedding = self.weights.get("embed_tokens.weight", target.get_input_embeddings().weight)
        self.to_target = torch.arange(len(self.weights["lm_head.weight"]))
        if "d2t" in self.weights:
            self.to_target = self.to_target + self.weights["d2t"]

    @torch.no_grad()
    def drafts(
        self,
        streams: Sequence[Tensor],
        token_ids: Sequence[int],
        num_drafts: int,
        paired: Mapping[int, int] | None = None,
    ) -> ReferenceDrafts:
        """`streams` are those of the known tokens, or of more, as `residual_streams` has them. The features of the
        positions in `paired` are paired with the tokens there, in place of those behind them.
        """
        behind = list(token_ids[1:])
        for position, token_id in (paired or {}).items():
            behind[position] = token_id
        features = self.combined([streams[tap][: len(behind)] for tap in self.taps])

        def next_logits(drafted: list[int]) -> Tensor:
            nonlocal features
            hidden, normed = self.forward(features, [*behind, *drafted])
            features = torch.cat([features, (normed if self.norm_output else hidden)[-1:]])
            return normed[-1] @ self.weights["lm_head.weight"].T

        return _greedy(next_logits, self.to_target, num_drafts)

    def combined(self, taps: Sequence[Tensor]) -> Tensor:
        """[T, d] of the target's residual streams [T, H] at each tap."""
        if self.norm_before_fc:
            taps = rms_norm(torch.cat(list(taps), -1), self.weights["input_norm.weight"], self.eps).chunk(len(taps), -1)
        if self.fc_norm:
            taps = [rms_norm(tap, self.weights[f"fc_norm.{i}.weight"], self.eps) for i, tap in enumerate(taps)]
        return torch.cat(list(taps), -1) @ self.weights["fc.weight"].T

    def forward(self, features: Tensor, token_ids: list[int]) -> tuple[Tensor, Tensor]:
        """[T, d] behind the layer, before and behind the final norm, of features [T, d] and the tokens behind them."""
        weights, layer = self.weights, "layers.0"
        normed = rms_norm(features, weights[f"{layer}.hidden_norm.weight"], self.eps)
        embedded = rms_norm(self.embedding[token_ids], weights[f"{layer}.input_layernorm.weight"], self.eps)
        residual = normed if self.norm_before_residual else features
        hidden = residual + attention(torch.cat([embedded, normed], -1), weights, layer, self.config)
        hidden = hidden + mlp(
            rms_norm(hidden, weights[f"{layer}.post_attention_layernorm.weight"], self.eps), weights, layer
        )
        return hidden, rms_norm(hidden, weights["norm.weight"], self.eps)


class CloverReference:
    """A Clover-2 checkpoint, and of the target the output layer, and the embedding if it has none."""

    def __init__(self, checkpoint_dir: str | Path, target: nn.Module):
        self.config, self.weights = _read(checkpoint_dir)
        self.eps = self.config["rms_norm_eps"]
        self.embedding = self.weights.get("clover_embed_tokens.weight", target.get_input_embeddings().weight)
        self.output = target.get_output_embeddings().weight

    @torch.no_grad()
    def drafts(self, streams: Sequence[Tensor], token_ids: Sequence[int], num_drafts: int) -> ReferenceDrafts:
        """`streams` are those of the known tokens, or of more, as `residual_streams` has them."""
        assert num_drafts <= self.config["num_heads"]
        known = list(token_ids)
        hidden = self.attend(streams[-1][: len(known) - 1], self.embedding[known[1:]], "clover_head_mlp_rnn")
        for i in range(self.config["num_hidden_layers"]):
            hidden = self.layer(hidden, f"layers.{i}")
        state = rms_norm(hidden, self.weights["clover_norm.weight"], self.eps)[-1:]

        def next_logits(drafted: list[int]) -> Tensor:
            nonlocal state
            if drafted:
                embedded = self.embedding[drafted[-1:]]
                state = self.attend(state, embedded, "clover_head_mlp_rnn2")
                read = self.linear(torch.cat([state, embedded], -1), "clover_head_mlp2")
            else:
                read = self.linear(state, "clover_head_mlp")
            return rms_norm(read, self.weights["clover_head_norm.weight"], self.eps)[0] @ self.output.T

        return _greedy(next_logits, torch.arange(len(self.output)), num_drafts)

    def attend(self, states: Tensor, embedded: Tensor, name: str) -> Tensor:
        """[T, d]: to each head's states is added its value, as far as query and key point the same way."""
        normed = rms_norm(states, self.weights[f"{name}.input_layernorm.weight"], self.eps)
        rows = (len(states), self.config["num_attention_heads"], -1)
        q, k, v = (
            self.linear(inputs, f"{name}.{part}").view(rows)
            for inputs, part in ((normed, "q"), (embedded, "k"), (embedded, "v"))
        )
        cosines = F.cosine_similarity(q, k, dim=-1, eps=self.eps)
        return states + (cosines.unsqueeze(-1) * v).flatten(1)

    def layer(self, hidden: Tensor, name: str) -> Tensor:
        weights = self.weights
        normed = rms_norm(hidden, weights[f"{name}.input_layernorm.weight"], self.eps)
        hidden = hidden + attention(normed, weights, name, self.config)
        return hidden + mlp(
            rms_norm(hidden, weights[f"{name}.post_attention_layernorm.weight"], self.eps), weights, name
        )

    def linear(self, inputs: Tensor, name: str) -> Tensor:
        return inputs @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]


def _greedy(next_logits: Callable[[list[int]], Tensor], to_target: Tensor, num_drafts: int) -> ReferenceDrafts:
    drafts = ReferenceDrafts([], [], [])
    for _ in range(num_drafts):
        logits = next_logits(drafts.token_ids)
        values, draft_ids = logits.sort(descending=True, stable=True)
        first, second = to_target[draft_ids[:2]].tolist() if len(logits) > 1 else (int(to_target[0]), -1)
        drafts.token_ids.append(first)
        drafts.runners_up.append(second)
        drafts.margins.append(float(values[0] - values[1]) if len(logits) > 1 else float("inf"))
    return drafts


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def mlp(x: Tensor, weights: dict[str, Tensor], layer: str) -> Tensor:
    gate, up, down = (weights[f"{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def attention(x: Tensor, weights: dict[str, Tensor], layer: str, config: dict[str, Any]) -> Tensor:
    """Causal, over rows at positions 0, 1, ..., without biases."""
    num_heads, num_kv_heads, head_dim = (
        config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    q, k, v = (
        (x @ weights[f"{layer}.self_attn.{name}_proj.weight"].T).view(len(x), -1, head_dim).transpose(0, 1)
        for name in ("q", "k", "v")
    )
    q, k = (rotate(states, config["rope_theta"]) for states in (q, k))
    k, v = (states.repeat_interleave(num_heads // num_kv_heads, 0) for states in (k, v))
    scores = q @ k.transpose(1, 2) / head_dim**0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
    attended = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
    return attended @ weights[f"{layer}.self_attn.o_proj.weight"].T


def rotate(states: Tensor, theta: float) -> Tensor:
    """Rotary embedding [heads, T, D]: element i of the first half and of the second are turned together."""
    half = states.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half) / half)
    angles = torch.arange(states.shape[1]).unsqueeze(1) * frequencies
    first, second = states.split(half, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _read(checkpoint_dir: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    path = Path(checkpoint_dir)
    weights = load_file(path / "model.safetensors")
    floats = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    return json.loads((path / "config.json").read_text()), floats
