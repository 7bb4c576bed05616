"""The flat decoder: a family's model as one function of packed rows.

Per layer four matrix products (query, key and value in one; gate and up in one), attention, and between them row-wise
operations that each are one kernel where we have it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from specpaged.modeling.attention.base import PagedPass
from specpaged.modeling.flat.config import FlatConfig
from specpaged.modeling.flat.row_wise import Rotations
from specpaged.modeling.forward_output import Argmax, ForwardOutput, ForwardRequest


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
        x: Tensor,  # [N, H]: the residual stream that enters the layer (may be overwritten)
        normed: Tensor,  # [N, H]: the same behind norm_before_attention
        rotations: Rotations,
        paged_pass: PagedPass,
        output_idx: Tensor | None,  # [U] int64: the only rows that are wanted of the last layer; None: all
    ) -> tuple[Tensor, Tensor]:
        """The residual stream behind attention, and what the MLP adds to it, [N or U, H] each."""
        query, key, value = self.heads(self.qkv(normed), rotations)
        attended = paged_pass.attend(self.layer_idx, query, key, value, self.scaling, self.window, self.softcap)
        attended = attended.reshape(len(x), -1)
        if output_idx is not None:
            x, attended = x.index_select(0, output_idx), attended.index_select(0, output_idx)
        added = self.o(attended)
        if self.norm_after_attention is not None:
            added = self.norm_after_attention(added)
        x, normed = self.norm_before_mlp.add(x, added)
        added = self.down(self.gate(self.gate_up(normed)))
        if self.norm_after_mlp is not None:
            added = self.norm_after_mlp(added)
        return x, added


class FlatDecoder(nn.Module):
    """A Decoder (see `source`) that calls the operations of its layers one by one."""

    def __init__(
        self,
        config: FlatConfig,
        embedding: Tensor,  # [V, H] dtype, or as it is stored
        layers: list[FlatLayer],
        final_norm: nn.Module,
        output: nn.Module,  # [M, H] -> [M, V]
        rotations: Rotations,  # cos and sin [max_model_len, R / 2] float32 of all positions
        dtype: torch.dtype,
    ):
        super().__init__()
        self.dtype = dtype
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
            multiplier = float(torch.tensor(multiplier).to(dtype))
        self.embedding_multiplier = multiplier
        self.logits_divisor = config.logits_divisor
        self.final_softcap = config.final_softcap

    @override
    def forward(
        self, token_ids: Tensor, positions: Tensor, paged_pass: PagedPass, request: ForwardRequest
    ) -> ForwardOutput:
        x = F.embedding(token_ids, self.embedding).to(self.dtype)
        if self.embedding_multiplier != 1.0:
            x = x * self.embedding_multiplier
        rotations = {
            rope: tuple(getattr(self, f"{rope}_{part}").index_select(0, positions) for part in ("cos", "sin"))
            for rope in self.ropes
        }
        added = None
        layer_inputs: dict[int, Tensor] = {}
        last_layer_idx = len(self.layers) - 1
        for layer_idx, layer in enumerate(self.layers):
            x, normed = layer.norm_before_attention.add(x, added)
            if request.wants_input_of(layer_idx):  # a copy, as the layer may overwrite x
                layer_inputs[layer_idx] = (
                    x.clone() if request.hidden_idx is None else x.index_select(0, request.hidden_idx)
                )
            output_idx = request.output_idx if layer_idx == last_layer_idx else None
            x, added = layer(x, normed, rotations, paged_pass, output_idx)
        x, normed = self.final_norm.add(x, added)
        last = request.output_rows(x, request.hidden_idx) if request.wants_last else None
        hidden_states = request.hidden_states(last, layer_inputs)
        normed = request.output_rows(normed, request.logits_idx)
        if request.argmax_of is not None:
            return ForwardOutput(None, Argmax(*self.output.argmax(normed, request.argmax_of)), hidden_states)
        return ForwardOutput(self.finished(self.output(normed)), None, hidden_states)

    @property
    def keeps_order(self) -> bool:
        """Whether the most likely token can be seen in the output layer's logits.

        What some families do to these may make ties, which then go to the lowest id.
        """
        return self.logits_divisor == 1.0 and self.final_softcap is None

    @property
    def has_argmax(self) -> bool:
        """Whether requests may ask for an argmax: the output layer has one of its own, and it is the logits' argmax."""
        return self.keeps_order and getattr(self.output, "has_argmax", False)

    def finished(self, logits: Tensor) -> Tensor:
        """The logits [M, V] of a family, made of its output layer's [M, V]."""
        if self.logits_divisor != 1.0:
            logits = logits / self.logits_divisor
        if self.final_softcap is not None:
            logits = torch.tanh(logits / self.final_softcap) * self.final_softcap
        return logits
