"""Heads whose greedy proposals are one call, where all of their operations are our C++ kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override

from specpaged.modeling.attention.base import PagedPass
from specpaged.modeling.flat.cpp_calls import Pools, greedy
from specpaged.modeling.flat.cpp_decoder import cpp_kernel, is_all_cpp, layer_structs, linears_of, rotations_of
from specpaged.modeling.flat.cpp_rounds import RoundsModel
from specpaged.modeling.forward_output import ForwardOutput, ForwardRequest, GreedyTokens
from specpaged.modeling.heads.clover import CloverDecoder, ResAttention
from specpaged.modeling.heads.eagle3 import Eagle3Decoder
from specpaged.modeling.huge_pages import gather_weights
from specpaged.modeling.ragged_batch import RaggedRow
from specpaged.paging.kv_cache import PagedKVCache
from specpaged.speculation.stop_rule import StopRule
from specpaged_kernels.cpu import decoder as decoder_kernel
from specpaged_kernels.cpu import heads as kernel
from specpaged_kernels.cpu.library import STORAGE, check_tensor


class CppHeads(nn.Module):
    """A Decoder (see `source`) that is `decoder`, and makes greedy proposals in one call."""

    def __init__(self, decoder: Eagle3Decoder | CloverDecoder, target_hidden_size: int):
        super().__init__()
        self.decoder = decoder
        self.config, self.target_ids = decoder.config, decoder.target_ids
        self.recur = getattr(decoder, "recur", None)
        self.target_hidden_size = target_hidden_size
        flat, self.dtype = decoder.config.flat, decoder.dtype
        self._function = kernel.functions()[decoder.dtype]
        self._pools = Pools(flat, decoder.dtype)
        rotations = rotations_of(decoder)
        gather_weights([cpp_kernel(linear) for linear in (*_own_linears(decoder), *linears_of(decoder.layers))])
        self._layers = layer_structs(decoder.layers, rotations)
        embedding = decoder.embedding
        struct = decoder_kernel.Decoder(
            len(decoder.layers), min(len(cos) for cos, _ in rotations.values()), flat.vocab_size, flat.hidden_size,
            flat.intermediate_size, flat.num_heads, flat.num_kv_heads, flat.head_dim, 0, flat.norm_eps, 1.0,
            decoder.embedding_multiplier, self._layers, embedding.data_ptr(), STORAGE[embedding.dtype],
            _weight(decoder.ends.output), decoder.final_norm.weight.data_ptr(),
        )  # fmt: skip
        own = _clover(decoder) if self.recur else _eagle3(decoder, target_hidden_size)
        self._kept = own.pop("kept", None)
        self._struct = kernel.Heads(decoder=struct, num_embeddings=len(embedding), **own)

    @override
    def forward(
        self, token_ids: Tensor, positions: Tensor, paged_pass: PagedPass, request: ForwardRequest
    ) -> ForwardOutput:
        return self.decoder(token_ids, positions, paged_pass, request)

    runs_greedy = True

    def greedy(
        self,
        rows: Sequence[RaggedRow],
        kv_cache: PagedKVCache,
        num_ids: int,
        num_further: Sequence[int],
        wants_logprobs: bool,
        stop_rule: StopRule | None,
        features: Tensor,
    ) -> list[GreedyTokens]:
        """What ModelRunner.greedy says; `features` [N, F] are those of all tokens of the rows."""
        check_tensor("features", features, (sum(len(row.token_ids) for row in rows), self._num_features), self.dtype)
        return greedy(
            self._function, self._struct, self._pools, kv_cache, rows, num_ids, num_further, wants_logprobs,
            stop_rule, features.data_ptr(),
        )  # fmt: skip

    def rounds_model(self, kv_cache: PagedKVCache, num_ids: int) -> RoundsModel:
        """These heads on these pools; of their own vocabulary those that the first num_ids ids of the target have."""

        def make() -> RoundsModel:
            return RoundsModel(
                self._function, self._struct, self._pools, kv_cache, num_draftable(self.decoder, num_ids),
                self.config.hidden_states, self.target_hidden_size, self.dtype,
            )  # fmt: skip

        return self._pools.kept(kv_cache, num_ids, make)

    @property
    def _num_features(self) -> int:
        reads = self.config.hidden_states
        return self.target_hidden_size * (reads.last + len(reads.layer_inputs))


def num_draftable(decoder: nn.Module, num_ids: int) -> int:
    """How many of the heads' own vocabulary, the first ones, are among the first num_ids ids of the target."""
    target_ids = decoder.target_ids
    return min(decoder.config.flat.vocab_size, num_ids) if target_ids is None else int((target_ids < num_ids).sum())


def are_all_cpp(decoder: Eagle3Decoder | CloverDecoder) -> bool:
    """Whether all operations of the heads are our C++ kernels, so that CppHeads can stand for them."""
    keeps_order = getattr(decoder.ends, "keeps_order", True)
    return keeps_order and decoder.embedding.dtype in STORAGE and is_all_cpp(decoder.layers, decoder.linears)


def _own_linears(decoder: Eagle3Decoder | CloverDecoder) -> list[nn.Module]:
    """Of `linears` those that are not the target's, which points to its weights."""
    is_target = decoder.ends is not decoder
    return [linear for linear in decoder.linears if not (is_target and linear is decoder.ends.output)]


def _weight(linear: nn.Module) -> decoder_kernel.Weight:
    return decoder_kernel.Weight.of(cpp_kernel(linear).weight)


def _bias(linear: nn.Module) -> int | None:
    bias = cpp_kernel(linear).bias
    return None if bias is None else bias.data_ptr()


def _eagle3(decoder: Eagle3Decoder, target_hidden_size: int) -> dict[str, object]:
    """The struct's entries; `kept` must outlive it."""
    config = decoder.config
    fc_norms = torch.cat([norm.weight for norm in decoder.fc_norms]) if decoder.fc_norms else None
    return {
        "kept": fc_norms,
        "num_features": target_hidden_size * len(config.hidden_states.layer_inputs),
        "feature_size": target_hidden_size,
        "fc": _weight(decoder.fc),
        "norm_before_fc": None if decoder.norm_before_fc is None else decoder.norm_before_fc.weight.data_ptr(),
        "fc_norms": None if fc_norms is None else fc_norms.data_ptr(),
        "token_norm": decoder.token_norm.weight.data_ptr(),
        "feature_norm": decoder.feature_norm.weight.data_ptr(),
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "target_ids": None if decoder.target_ids is None else decoder.target_ids.data_ptr(),
    }


def _clover(decoder: CloverDecoder) -> dict[str, object]:
    def res_attention(part: ResAttention) -> kernel.ResAttention:
        return kernel.ResAttention(
            part.norm.weight.data_ptr(), _weight(part.query), _weight(part.key_value), _bias(part.query),
            _bias(part.key_value),
        )  # fmt: skip

    return {
        "num_features": decoder.config.flat.hidden_size,
        "is_clover": 1,
        "regressive": res_attention(decoder.regressive),
        "recurrent": res_attention(decoder.recurrent),
        "first": _weight(decoder.first),
        "later": _weight(decoder.later),
        "first_bias": _bias(decoder.first),
        "later_bias": _bias(decoder.later),
        "head_norm": decoder.head_norm.weight.data_ptr(),
    }
