"""EAGLE-3's heads (Y. Li et al., 2503.01840): one decoder layer that reads three of the target's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from specpaged.modeling.attention.base import PagedPass
from specpaged.modeling.flat.decoder import FlatLayer
from specpaged.modeling.flat.row_wise import Norm, Rotations
from specpaged.modeling.forward_output import ForwardOutput, ForwardRequest
from specpaged.modeling.heads.config import HeadsConfig


class Eagle3Decoder(nn.Module):
    """A Decoder (see `source`) over pairs: a row is a token, and its features those of the position before it.

    A pass finds for each row what follows its token, and its hidden states are the features of that token's position,
    for the pass that runs what follows. Three known tokens a b c, of which the target has run two, and two drafts:

        position      0      1      2
        token         b      c      d1        of the row: the one behind the position
        features      f0     f1     g1        f of the target, g of the pass before
        finds                d1     d2
    """

    embedding_multiplier = 1.0

    def __init__(
        self,
        config: HeadsConfig,
        embedding: Tensor,  # [V, H]: the target's, or their own
        fc: nn.Module,  # [N, F] -> [N, H]
        norm_before_fc: Norm | None,  # of all of F
        fc_norms: list[Norm],  # of each layer's share, behind that; or none
        token_norm: Norm,
        feature_norm: Norm,
        layer: FlatLayer,
        final_norm: Norm,
        output: nn.Module,  # [M, H] -> [M, the draft's own vocabulary]
        rotations: Rotations,  # cos and sin [max_model_len, R / 2] float32 of all positions
        target_ids: Tensor | None,  # [the draft's vocabulary] int64, ascending: which tokens these are; None: all of V
        dtype: torch.dtype,
    ):
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.embedding = nn.Parameter(embedding, requires_grad=False)
        self.fc, self.norm_before_fc, self.fc_norms = fc, norm_before_fc, nn.ModuleList(fc_norms)
        self.token_norm, self.feature_norm = token_norm, feature_norm
        self.layers = nn.ModuleList([layer])
        self.final_norm, self.output = final_norm, output
        self.ropes = tuple(rotations)
        for rope, (cos, sin) in rotations.items():
            self.register_buffer(f"{rope}_cos", cos, persistent=False)
            self.register_buffer(f"{rope}_sin", sin, persistent=False)
        self.register_buffer("target_ids", target_ids, persistent=False)

    @property
    def ends(self) -> Eagle3Decoder:
        """Whose output layer it has."""
        return self

    @property
    def linears(self) -> list[nn.Module]:
        """Those that are not of its layers."""
        return [self.fc, self.output]

    @override
    def forward(
        self, token_ids: Tensor, positions: Tensor, paged_pass: PagedPass, request: ForwardRequest
    ) -> ForwardOutput:
        features = request.features.values
        if not request.features.are_own:
            features = self.fc(self._normed(features))
        normed = self.feature_norm(features)
        x = normed.clone() if self.config.norm_before_residual else features
        tokens = self.token_norm(F.embedding(token_ids, self.embedding).to(self.dtype))
        rotations = {
            rope: tuple(getattr(self, f"{rope}_{part}").index_select(0, positions) for part in ("cos", "sin"))
            for rope in self.ropes
        }
        both = torch.cat((tokens, normed), dim=-1)
        (layer,) = self.layers
        x, added = layer(x, both, rotations, paged_pass, request.output_idx)
        x, normed = self.final_norm.add(x, added)
        last = None
        if request.wants_last:
            last = request.output_rows(normed if self.config.norm_output else x, request.hidden_idx)
        logits = self.output(request.output_rows(normed, request.logits_idx))
        return ForwardOutput(logits, None, request.hidden_states(last, {}))

    def _normed(self, features: Tensor) -> Tensor:
        """[N, F] -> [N, F]: hidden states of the target, side by side, behind the norms that there are."""
        if self.norm_before_fc is not None:
            features = self.norm_before_fc(features)
        if not self.fc_norms:
            return features
        parts = features.chunk(len(self.fc_norms), dim=-1)
        return torch.cat([norm(part.contiguous()) for norm, part in zip(self.fc_norms, parts, strict=True)], dim=-1)
