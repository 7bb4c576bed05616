"""EAGLE-3 (2503.01840): one layer that reads three levels of the target's hidden states, and then its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specpaged.modeling.forward_output import HiddenStates, HiddenStatesRequest
from specpaged.training.heads.llama import MLP, Attention, HeadShape, RMSNorm
from specpaged.training.heads.losses import EAGLE3_DECAY, eagle3_loss
from specpaged.training.heads.target import FrozenTarget

TEST_TIME_STEPS = 7
SHALLOW = 16


def aux_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """The layers whose inputs are read: (2, n // 2, n - 3) of n layers, as published.

    Of fewer than SHALLOW, where three layers are much of the target, the last one's input in place of the third; of
    very few layers the nearest distinct ones, and of one or two some twice.
    """
    low, middle, high = 2, num_layers // 2, num_layers - (3 if num_layers >= SHALLOW else 1)
    if low < middle < high:
        return low, middle, high
    return tuple((i * (num_layers - 1) + 1) // 2 for i in range(3))


class MidLayer(nn.Module):
    """The layer: a token's embedding and a feature in, each behind its own norm; the feature is the residual stream."""

    def __init__(self, shape: HeadShape):
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.hidden_norm = RMSNorm(size, eps)
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = Attention(shape, 2 * size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(shape)

    def forward(self, embedded: Tensor, g: Tensor, steps: list[tuple[Tensor, Tensor]], first_row: int) -> Tensor:
        """[B, T, d] twice -> [B, T - first_row, d] in step 0, then [B, T - first_row, d] twice -> the same; see
        Attention."""
        inputs = torch.cat([self.input_layernorm(embedded), self.hidden_norm(g)], -1)
        skipped = 0 if steps else first_row
        h = g[:, skipped:] + self.self_attn(inputs, steps, first_row)
        return h + self.mlp(self.post_attention_layernorm(h))


class Eagle3(nn.Module):
    """The heads. Row i of step j reads token i + 1 + j at position i + j, and proposes token i + 2 + j."""

    method = "eagle3"
    num_steps = TEST_TIME_STEPS
    decay = EAGLE3_DECAY

    def __init__(self, shape: HeadShape, layer_ids: Sequence[int], vocabulary: Tensor):
        super().__init__()
        self.shape = shape
        self.layer_ids = tuple(layer_ids)
        self.fc = nn.Linear(len(self.layer_ids) * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = MidLayer(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, len(vocabulary), bias=False)
        in_vocabulary = torch.zeros(shape.vocab_size, dtype=torch.bool)
        in_vocabulary[vocabulary] = True
        self.register_buffer("d2t", vocabulary - torch.arange(len(vocabulary)))  # [W] int64
        self.register_buffer("t2d", in_vocabulary)  # [V] bool
        self.request = HiddenStatesRequest(last=True, layer_inputs=self.layer_ids)

    @classmethod
    def fresh(cls, target: FrozenTarget, vocabulary: Tensor, sample: Sequence[Sequence[int]]) -> Eagle3:
        """Heads that have learned nothing. `vocabulary` [W] int64: the draft vocabulary's token ids, ascending.

        They begin with the target's own norm and output layer, and with features that have a mean square of about 1
        over the `sample` of sequences, whatever the scale of the target's residual stream.
        """
        heads = cls(HeadShape.of(target), aux_layer_ids(len(target.config.layers)), vocabulary)
        features = torch.cat(target.hidden_states(sample, heads.request).layer_inputs, -1)
        with torch.no_grad():
            features = heads.to(target.device).fc(features[features.any(-1)])
            heads.fc.weight.div_(features.square().mean().sqrt())
            heads.norm.weight.copy_(target.final_norm_weight)
            heads.lm_head.weight.copy_(target.output_rows(vocabulary.to(target.device)))
        return heads

    def unroll(
        self, hidden: HiddenStates, input_embedding: Callable[[int], Tensor], num_steps: int, first_row: int = 0
    ) -> Iterator[Tensor]:
        """States [B, T - first_row, d] that the output layer reads, of each step.

        `input_embedding(j)` is asked for when step j begins: [B, T, d], or from `first_row` on in all steps but 0.
        """
        g = self.fc(torch.cat(hidden.layer_inputs, -1))
        steps: list[tuple[Tensor, Tensor]] = []
        for step in range(num_steps):
            g = self.midlayer(input_embedding(step), g, steps, first_row)
            yield self.norm(g)

    def logits(self, states: Tensor, target: FrozenTarget) -> Tensor:
        """[..., d] -> [..., W] float32, over the draft vocabulary."""
        return self.lm_head(states).float()

    def token_ids(self, logits: Tensor) -> Tensor:
        """[..., W] -> [...] int64: the most likely tokens, as the target numbers them."""
        most_likely = logits.argmax(-1)
        return most_likely + self.d2t[most_likely]

    def loss(self, states: Tensor, last: Tensor, target: FrozenTarget) -> Tensor:
        """[R, d], [R, d] -> []: summed over rows. `last` is the target's hidden state where it chose that token."""
        with torch.no_grad():
            target_logits = target.logits(target.final_norm(last))
        vocabulary = torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t
        return eagle3_loss(self.logits(states, target), target_logits, vocabulary, self.t2d)

    def as_config(self) -> dict[str, Any]:
        """The config.json, in the authors' words; vLLM reads the layers out of `eagle_config`."""
        ids = list(self.layer_ids)
        return {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"} | self.shape.as_config() | {
            "num_hidden_layers": 1,
            "draft_vocab_size": len(self.d2t),
            "eagle_aux_hidden_state_layer_ids": ids,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids},
        }  # fmt: skip

    @classmethod
    def from_config(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> Eagle3:
        """Heads of the sizes of a checkpoint, to be filled with its tensors."""
        d2t = tensors["d2t"]
        ids = config["eagle_aux_hidden_state_layer_ids"]
        return cls(HeadShape.from_config(config), ids, d2t + torch.arange(len(d2t)))
