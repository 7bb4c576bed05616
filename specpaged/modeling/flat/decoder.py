"""The flat decoder: a family's model as one function of packed rows.

Per layer four matrix products (query, key and value in one; gate and up in one), attention, and between them row-wise
parts that each are one kernel where we have it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specpaged.modeling.attention.base import PagedPass
from specpaged.modeling.flat.config import FlatConfig
from specpaged.modeling.flat.parts import Rotations


class FlatLayer(nn.Module):
    """One decoder layer."""

    def __init__(
        self,
        config: FlatConfig,
        layer_idx: int,
        linears: dict[str, nn.Module],  # "qkv", "o", "gate_up", "down"
        norms: dict[str, nn.Module],  # see NormNames; those behind attention and MLP are rare
        heads: nn.Module,
        gate: nn.Module,
    ):
        super().__init__()
        self.layer_idx = layer_idx
        self.window = config.layers[layer_idx].window
        self.scaling, self.softcap = config.scaling, config.softcap
        self.qkv, self.o = linears["qkv"], linears["o"]
        self.gate_up, self.down = linears["gate_up"], linears["down"]
        self.norm_before_attention, self.norm_before_mlp = norms["before_attention"], norms["before_mlp"]
        self.norm_after_attention, self.norm_after_mlp = norms.get("after_attention"), norms.get("after_mlp")
        self.heads, self.gate = heads, gate

    def forward(
        self,
        x: Tensor,  # [N, H]
        added: Tensor | None,  # [N, H]: what the layer before adds to x
        rotations: Rotations,
        paged_pass: PagedPass,
        kept_rows: Tensor | None,  # [M] int64: rows wanted of the last layer; None: all
    ) -> tuple[Tensor, Tensor]:
        """x and what this layer adds to it, [N or M, H] each."""
        x, normed = self.norm_before_attention.add(x, added)
        query, key, value = self.heads(self.qkv(normed), rotations)
        attended = paged_pass.attend(self.layer_idx, query, key, value, self.scaling, self.window, self.softcap)
        attended = attended.reshape(len(x), -1)
        if kept_rows is not None:
            x, attended = x.index_select(0, kept_rows), attended.index_select(0, kept_rows)
        added = self.o(attended)
        if self.norm_after_attention is not None:
            added = self.norm_after_attention(added)
        x, normed = self.norm_before_mlp.add(x, added)
        added = self.down(self.gate(self.gate_up(normed)))
        if self.norm_after_mlp is not None:
            added = self.norm_after_mlp(added)
        return x, added


class FlatDecoder(nn.Module):
    """See Source: packed rows in, logits out."""

    def __init__(
        self,
        config: FlatConfig,
        embedding: Tensor,  # [V, H]
        layers: list[FlatLayer],
        final_norm: nn.Module,
        output: nn.Module,  # [M, H] -> [M, V]
        rotations: Rotations,  # cos and sin [max_model_len, R / 2] float32 of all positions
    ):
        super().__init__()
        self.embedding = nn.Parameter(embedding, requires_grad=False)
        self.layers = nn.ModuleList(layers)
        self.final_norm = final_norm
        self.output = output
        self.ropes = tuple(rotations)
        self.num_positions = min((len(cos) for cos, _ in rotations.values()), default=2**62)
        for rope, (cos, sin) in rotations.items():
            self.register_buffer(f"{rope}_cos", cos, persistent=False)
            self.register_buffer(f"{rope}_sin", sin, persistent=False)
        multiplier = config.embedding_multiplier
        if config.rounds_embedding_multiplier:
            multiplier = float(torch.tensor(multiplier).to(embedding.dtype))
        self.embedding_multiplier = multiplier
        self.logits_divisor = config.logits_divisor
        self.final_softcap = config.final_softcap

    def forward(self, token_ids: Tensor, positions: Tensor, paged_pass: PagedPass, logits_idx: Tensor | None) -> Tensor:
        """token_ids and positions [N] int64, logits_idx [M] int64 (None: all rows) -> [M, V]"""
        return self.finished(self.output(self._normed(token_ids, positions, paged_pass, logits_idx)))

    @property
    def keeps_order(self) -> bool:
        """Whether the output layer's logits are the final ones: what some families do to them may make ties."""
        return self.logits_divisor == 1.0 and self.final_softcap is None

    @property
    def has_argmax(self) -> bool:
        """Whether the output layer's own argmax is that of the logits."""
        return self.keeps_order and getattr(self.output, "has_argmax", False)

    def argmax(
        self,
        token_ids: Tensor,
        positions: Tensor,
        paged_pass: PagedPass,
        logits_idx: Tensor | None,
        vocab_size: int,
    ) -> tuple[Tensor, Tensor]:
        """The most likely of the first vocab_size ids [M] int64, and whether the row has one [M] bool; no logits."""
        return self.output.argmax(self._normed(token_ids, positions, paged_pass, logits_idx), vocab_size)

    def _normed(self, token_ids: Tensor, positions: Tensor, paged_pass: PagedPass, logits_idx: Tensor | None) -> Tensor:
        """What the output layer reads: [M, H]."""
        x = F.embedding(token_ids, self.embedding)
        if self.embedding_multiplier != 1.0:
            x = x * self.embedding_multiplier
        rotations = {
            rope: tuple(getattr(self, f"{rope}_{part}").index_select(0, positions) for part in ("cos", "sin"))
            for rope in self.ropes
        }
        added = None
        last = len(self.layers) - 1
        for layer_idx, layer in enumerate(self.layers):
            x, added = layer(x, added, rotations, paged_pass, logits_idx if layer_idx == last else None)
        return self.final_norm.add(x, added)[1]

    def finished(self, logits: Tensor) -> Tensor:
        """[M, V]: what a family does to the output layer's logits."""
        if self.logits_divisor != 1.0:
            logits = logits / self.logits_divisor
        if self.final_softcap is not None:
            logits = torch.tanh(logits / self.final_softcap) * self.final_softcap
        return logits
