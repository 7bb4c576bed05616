"""Clover-2 (2408.00264): two layers over the target's last hidden states, then a recurrence over the drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specpaged.modeling.forward_output import HiddenStates, HiddenStatesRequest
from specpaged.training.heads.llama import HeadShape, Layer, RMSNorm
from specpaged.training.heads.losses import CLOVER_DECAY, clover_loss
from specpaged.training.heads.target import FrozenTarget

NUM_HEADS = 5
NUM_LAYERS = 2
INIT_NOISE = 0.01


class ResAttention(nn.Module):
    """x + cos(q, k) v for each head, q of the state and k, v of one token's embedding: no softmax, no KV."""

    def __init__(self, shape: HeadShape):
        super().__init__()
        size = shape.hidden_size
        self.num_heads, self.eps = shape.num_attention_heads, shape.rms_norm_eps
        self.input_layernorm = RMSNorm(size, shape.rms_norm_eps)
        self.q, self.k, self.v = (nn.Linear(size, size) for _ in range(3))

    def forward(self, x: Tensor, embedded: Tensor) -> Tensor:
        """[..., d] twice -> [..., d]"""
        query, key, value = (
            projected.unflatten(-1, (self.num_heads, -1))
            for projected in (self.q(self.input_layernorm(x)), self.k(embedded), self.v(embedded))
        )
        gate = F.cosine_similarity(query, key, dim=-1, eps=self.eps)
        return x + (gate.unsqueeze(-1) * value).flatten(-2)


class Clover(nn.Module):
    """The heads. Row i of head 0 reads the target's state i and token i + 1, and proposes token i + 2.

    Head j reads the state of head j - 1, and token i + 1 + j. Embedding and output layer are the target's.
    """

    method = "clover"
    num_steps = NUM_HEADS
    decay = CLOVER_DECAY
    request = HiddenStatesRequest(last=True)

    def __init__(self, shape: HeadShape):
        super().__init__()
        self.shape = shape
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.clover_head_mlp_rnn = ResAttention(shape)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(NUM_LAYERS))
        self.clover_norm = RMSNorm(size, eps)
        self.clover_head_mlp = nn.Linear(size, size)
        self.clover_head_mlp_rnn2 = ResAttention(shape)
        self.clover_head_mlp2 = nn.Linear(2 * size, size)
        self.clover_head_norm = RMSNorm(size, eps)

    @classmethod
    def fresh(cls, target: FrozenTarget) -> Clover:
        """Heads that have learned nothing: layers as the target's last, where it is a Llama layer; norms as its last;
        and matrices that hand on the state, but for noise."""
        heads = cls(HeadShape.of(target))
        with torch.no_grad():
            for norm in (heads.clover_norm, heads.clover_head_norm):
                norm.weight.copy_(target.final_norm_weight)
            for linear in (heads.clover_head_mlp, heads.clover_head_mlp2):
                nn.init.uniform_(linear.weight, -INIT_NOISE, INIT_NOISE)
                nn.init.zeros_(linear.bias)
                linear.weight[:, : heads.shape.hidden_size] += torch.eye(heads.shape.hidden_size)
            last_layer = target.last_layer()
            wanted = {name: tensor.shape for name, tensor in heads.layers[0].state_dict().items()}
            is_llama = target.config.activation == "silu" and not target.config.norm_offset
            is_llama = is_llama and target.config.residual_multiplier == 1.0 and target.config.scaling is None
            if is_llama and {name: tensor.shape for name, tensor in last_layer.items()} == wanted:
                for layer in heads.layers:
                    layer.load_state_dict(last_layer)
        return heads

    def unroll(
        self, hidden: HiddenStates, input_embedding: Callable[[int], Tensor], num_steps: int, first_row: int = 0
    ) -> Iterator[Tensor]:
        """States [B, T - first_row, d] that the output layer reads, of each head.

        `input_embedding(j)` is asked for when head j begins: [B, T, d], or from `first_row` on in all heads but 0.
        """
        h = self.clover_head_mlp_rnn(hidden.last, input_embedding(0))
        *layers, last_layer = self.layers
        for layer in layers:
            h = layer(h)
        h = last_layer(h, first_row)
        h = self.clover_norm(h)
        yield self.clover_head_norm(self.clover_head_mlp(h))
        for step in range(1, num_steps):
            embedded = input_embedding(step)
            h = self.clover_head_mlp_rnn2(h, embedded)
            yield self.clover_head_norm(self.clover_head_mlp2(torch.cat([h, embedded], -1)))

    def logits(self, states: Tensor, target: FrozenTarget) -> Tensor:
        """[..., d] -> [..., V] float32."""
        return target.logits(states)

    def token_ids(self, logits: Tensor) -> Tensor:
        """[..., V] -> [...] int64: the most likely tokens."""
        return logits.argmax(-1)

    def loss(self, states: Tensor, last: Tensor, target: FrozenTarget) -> Tensor:
        """[R, d], [R, d] -> []: summed over rows. `last` is the target's hidden state where it chose that token."""
        with torch.no_grad():
            target_states = target.final_norm(last)
            target_logits = target.logits(target_states)
        return clover_loss(states.float(), target_states, self.logits(states, target), target_logits)

    def as_config(self) -> dict[str, Any]:
        """The config.json."""
        return {"architectures": ["CloverForCausalLM"], "model_type": "clover"} | self.shape.as_config() | {
            "num_hidden_layers": NUM_LAYERS,
            "num_heads": NUM_HEADS,
        }  # fmt: skip

    @classmethod
    def from_config(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> Clover:
        """Heads of the sizes of a checkpoint, to be filled with its tensors."""
        return cls(HeadShape.from_config(config))
