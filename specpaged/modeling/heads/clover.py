"""Clover's heads (B. Xiao et al., 2405.00263 and 2408.00264): a block with attention, then a recurrence without."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from specpaged.modeling.attention.base import PagedPass
from specpaged.modeling.flat.decoder import FlatDecoder, FlatLayer
from specpaged.modeling.flat.row_wise import Norm, Rotations
from specpaged.modeling.forward_output import ForwardOutput, ForwardRequest
from specpaged.modeling.heads.config import HeadsConfig


class ResAttention(nn.Module):
    """Clover's attention decoder: to each head's share of x is added what a token's embedding gives, as far as the two
    point the same way.
    """

    def __init__(self, norm: Norm, query: nn.Module, key_value: nn.Module, num_heads: int, eps: float):
        super().__init__()
        self.norm, self.query, self.key_value = norm, query, key_value
        self.num_heads, self.eps = num_heads, eps

    def forward(self, x: Tensor, embedded: Tensor) -> Tensor:
        """x, embedded [N, H] -> x + concat over heads of cos(q, k) * v, [N, H]"""
        query = self.query(self.norm(x)).view(len(x), self.num_heads, -1)
        key, value = self.key_value(embedded).view(len(x), 2, self.num_heads, -1).unbind(1)
        cosine = F.cosine_similarity(query.float(), key.float(), dim=-1, eps=self.eps).to(x.dtype)
        return x + (cosine[..., None] * value).reshape(x.shape)

    def beside(self, x: Tensor, embedded: Tensor) -> Tensor:
        """The same, and the embedding behind it: [N, 2 H]"""
        return torch.cat((self(x, embedded), embedded), dim=-1)


class TritonResAttention(ResAttention):
    """ResAttention in our Triton kernel: one launch behind the three projections."""

    def __init__(self, norm: Norm, query: nn.Module, key_value: nn.Module, num_heads: int, eps: float):
        super().__init__(norm, query, key_value, num_heads, eps)
        from specpaged_kernels.res_attention import res_attention  # where it is wanted: defining kernels takes a second

        self._res_attention = res_attention

    @override
    def forward(self, x: Tensor, embedded: Tensor) -> Tensor:
        return self._run(x, embedded, None)

    @override
    def beside(self, x: Tensor, embedded: Tensor) -> Tensor:
        return self._run(x, embedded, embedded)

    def _run(self, x: Tensor, embedded: Tensor, behind: Tensor | None) -> Tensor:
        query, key_value = self.query(self.norm(x)), self.key_value(embedded)
        return self._res_attention(x, query, key_value, self.num_heads, self.eps, behind)


class CloverDecoder(nn.Module):
    """A Decoder (see `source`) over pairs: a row is a token, and its features the target's last hidden state of the
    position before it, ahead of the target's final norm.

    A pass finds for each row what follows its token. What follows that is `recur`'s, which reads no KV.
    """

    def __init__(
        self,
        config: HeadsConfig,
        target: FlatDecoder,  # whose output layer these heads share
        embedding: Tensor | None,  # [V, H] their own; None: the target's
        regressive: ResAttention,  # of the block, and of the recurrence
        recurrent: ResAttention,
        layers: list[FlatLayer],
        block_norm: Norm,
        first: nn.Module,  # [M, H] -> [M, H]
        later: nn.Module,  # [M, 2 H] -> [M, H]
        head_norm: Norm,
        rotations: Rotations,  # cos and sin [max_model_len, R / 2] float32 of all positions
        dtype: torch.dtype,
    ):
        super().__init__()
        self.config = config
        self.dtype = dtype
        self._target = [target]  # whose tensors are not ours to hold
        shared = embedding is None
        self.embedding = nn.Parameter(target.embedding if shared else embedding, requires_grad=False)
        self.embedding_multiplier = target.embedding_multiplier if shared else 1.0
        self.regressive, self.recurrent = regressive, recurrent
        self.layers = nn.ModuleList(layers)
        self.final_norm, self.head_norm = block_norm, head_norm
        self.first, self.later = first, later
        self.ropes = tuple(rotations)
        for rope, (cos, sin) in rotations.items():
            self.register_buffer(f"{rope}_cos", cos, persistent=False)
            self.register_buffer(f"{rope}_sin", sin, persistent=False)
        self.target_ids = None  # its vocabulary is the target's

    @property
    def ends(self) -> FlatDecoder:
        """Whose output layer it has."""
        return self._target[0]

    @property
    def linears(self) -> list[nn.Module]:
        """Those that are not of its layers."""
        attentions = (self.regressive, self.recurrent)
        of_attentions = [linear for part in attentions for linear in (part.query, part.key_value)]
        return [*of_attentions, self.first, self.later, self.ends.output]

    @override
    def forward(
        self, token_ids: Tensor, positions: Tensor, paged_pass: PagedPass, request: ForwardRequest
    ) -> ForwardOutput:
        x = self.regressive(request.features.values, self._embedded(token_ids))
        rotations = {
            rope: tuple(getattr(self, f"{rope}_{part}").index_select(0, positions) for part in ("cos", "sin"))
            for rope in self.ropes
        }
        added = None
        for layer_idx, layer in enumerate(self.layers):
            x, normed = layer.norm_before_attention.add(x, added)
            output_idx = request.output_idx if layer_idx + 1 == len(self.layers) else None
            x, added = layer(x, normed, rotations, paged_pass, output_idx)
        _, normed = self.final_norm.add(x, added)
        last = request.output_rows(normed, request.hidden_idx) if request.wants_last else None
        logits = self._logits(self.first(request.output_rows(normed, request.logits_idx)))
        return ForwardOutput(logits, None, request.hidden_states(last, {}))

    def recur(self, hidden: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """One more token [M] int64 behind hidden states [M, H]: logits [M, V] of what follows, and hidden states."""
        embedded = self._embedded(token_ids)
        both = self.recurrent.beside(hidden, embedded)
        return self._logits(self.later(both)), both[:, : hidden.shape[1]]

    def _embedded(self, token_ids: Tensor) -> Tensor:
        embedded = F.embedding(token_ids, self.embedding).to(self.dtype)
        return embedded if self.embedding_multiplier == 1.0 else embedded * self.embedding_multiplier

    def _logits(self, x: Tensor) -> Tensor:
        return self.ends.finished(self.ends.output(self.head_norm(x)))
