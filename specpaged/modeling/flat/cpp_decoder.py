"""The flat decoder in one call, where all of its operations are our C++ kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override

from specpaged.modeling.attention.base import PagedPass
from specpaged.modeling.attention.cpp_pass import CppPass
from specpaged.modeling.flat.config import FlatConfig
from specpaged.modeling.flat.cpp_calls import Pools, greedy
from specpaged.modeling.flat.cpp_rounds import RoundsModel, run_rounds
from specpaged.modeling.flat.decoder import FlatDecoder, FlatLayer
from specpaged.modeling.flat.row_wise import CppGate
from specpaged.modeling.forward_output import ForwardOutput, ForwardRequest, GreedyTokens, HiddenStates
from specpaged.modeling.huge_pages import gather_weights
from specpaged.modeling.linear import CppKernel, FastLinear, RowExactLinear
from specpaged.modeling.ragged_batch import RaggedBatch, RaggedRow
from specpaged.modeling.rounds import DecodingRow, Rounds
from specpaged.paging.kv_cache import PagedKVCache
from specpaged.speculation.stop_rule import StopRule
from specpaged_kernels.cpu import decoder as kernel
from specpaged_kernels.cpu.library import STORAGE, check_status, check_tensor
from specpaged_kernels.cpu.paged_attention import Pass, make_pass


class CppDecoder(nn.Module):
    """A Decoder (see `source`) that computes what `decoder` does, bit for bit, in one call."""

    def __init__(self, config: FlatConfig, decoder: FlatDecoder):
        super().__init__()
        self.config = config
        self.decoder = decoder
        self._function = kernel.functions()[decoder.dtype]
        self._greedy_function = kernel.greedy_functions()[decoder.dtype]
        self._pools = Pools(config, decoder.dtype)
        gather_weights([cpp_kernel(linear) for linear in (*linears_of(decoder.layers), decoder.output)])
        self._layers = layer_structs(decoder.layers, rotations_of(decoder))
        self._struct = kernel.Decoder(
            len(decoder.layers), decoder.num_positions, config.vocab_size, config.hidden_size,
            config.intermediate_size, config.num_heads, config.num_kv_heads, config.head_dim,
            int(decoder.layers[0].gate.activation == "gelu_tanh"),
            config.norm_eps, config.residual_multiplier, decoder.embedding_multiplier, self._layers,
            decoder.embedding.data_ptr(), STORAGE[decoder.embedding.dtype],
            kernel.Weight.of(cpp_kernel(decoder.output).weight), decoder.final_norm.weight.data_ptr(),
        )  # fmt: skip

    @override
    def forward(
        self, token_ids: Tensor, positions: Tensor, paged_pass: PagedPass, request: ForwardRequest
    ) -> ForwardOutput:
        num_rows, logits_idx = token_ids.shape[0], request.logits_idx
        if not isinstance(paged_pass, CppPass):
            return self.decoder(token_ids, positions, paged_pass, request)
        pools = self._pools.addresses(paged_pass.kv_layers)
        call = self._call(paged_pass.batch, num_rows)
        check_tensor("token_ids", token_ids, (num_rows,), torch.int64)
        check_tensor("positions", positions, (num_rows,), torch.int64)
        if logits_idx is not None:
            check_tensor("logits_idx", logits_idx, (logits_idx.numel(),), torch.int64)
        num_logits = num_rows if logits_idx is None else logits_idx.numel()
        logits = torch.empty(num_logits, self.config.vocab_size, dtype=self.decoder.dtype)
        struct, hidden_states = None, None
        if request.hidden is not None:
            hidden_idx = torch.arange(num_rows) if request.hidden_idx is None else request.hidden_idx
            check_tensor("hidden_idx", hidden_idx, (len(hidden_idx),), torch.int64)
            layers = torch.tensor(request.hidden.layer_inputs, dtype=torch.int64)
            shape = (len(hidden_idx), self.config.hidden_size)
            layer_inputs = logits.new_empty(len(layers), *shape)
            last = logits.new_empty(shape) if request.hidden.last else None
            hidden_states = HiddenStates(last, layer_inputs.unbind())
            struct = kernel.HiddenStates(
                hidden_idx.data_ptr(), len(hidden_idx), layers.data_ptr(), len(layers),
                layer_inputs.data_ptr(), None if last is None else last.data_ptr(), 0,
            )  # fmt: skip
        status = self._function(
            ctypes.addressof(self._struct), ctypes.addressof(call), ctypes.addressof(pools),
            token_ids.data_ptr(), positions.data_ptr(),
            None if logits_idx is None else logits_idx.data_ptr(), num_logits, logits.data_ptr(),
            None if struct is None else ctypes.addressof(struct),
        )  # fmt: skip
        check_status(status)
        return ForwardOutput(self.decoder.finished(logits), None, hidden_states)

    @property
    def runs_greedy(self) -> bool:
        """Whether `greedy` can make passes."""
        return self.decoder.keeps_order

    def greedy(
        self,
        rows: Sequence[RaggedRow],
        kv_cache: PagedKVCache,
        num_ids: int,
        num_further: Sequence[int],
        wants_logprobs: bool,
        stop_rule: StopRule | None,
    ) -> list[GreedyTokens]:
        """What ModelRunner.greedy says."""
        return greedy(
            self._greedy_function, self._struct, self._pools, kv_cache, rows, num_ids, num_further, wants_logprobs,
            stop_rule,
        )  # fmt: skip

    def rounds(
        self,
        rows: Sequence[DecodingRow],
        kv_cache: PagedKVCache,
        num_ids: int,
        num_rounds: int,
        draft: RoundsModel | None,
        stop_rule: StopRule | None,
        goes_on: bool,
        tells_found: bool,
    ) -> Rounds:
        """What ModelRunner.rounds says."""
        target = self.rounds_model(kv_cache, num_ids)
        return run_rounds(rows, target, num_rounds, draft, stop_rule, goes_on, tells_found)

    def rounds_model(self, kv_cache: PagedKVCache, num_ids: int) -> RoundsModel:
        """This decoder on these pools, of which it finds the first num_ids ids."""

        def make() -> RoundsModel:
            return RoundsModel(self._greedy_function, self._struct, self._pools, kv_cache, num_ids)

        return self._pools.kept(kv_cache, num_ids, make)

    def _call(self, batch: RaggedBatch, num_rows: int) -> Pass:
        """Behind `_pools`: the pass is checked against the pools that this has seen."""
        config = self.config
        return make_pass(
            num_rows, self._pools.num_slots, batch.slot_mapping, batch.page_table, batch.cu_query_lens,
            batch.context_lens, batch.block_size, config.num_heads, config.num_kv_heads, config.head_dim,
            config.scaling, config.softcap, block_stride=batch.block_stride, kv_dtype=self._pools.kv_dtype,
        )  # fmt: skip


def rotations_of(module: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """cos and sin [positions, R / 2] of a decoder's `ropes`, by name."""
    return {rope: (getattr(module, f"{rope}_cos"), getattr(module, f"{rope}_sin")) for rope in module.ropes}


def layer_structs(layers: Sequence[FlatLayer], rotations: dict[str, tuple[Tensor, Tensor]]) -> ctypes.Array:
    """The layers as the C++ code reads them; their tensors must outlive this."""
    structs = (kernel.Layer * len(layers))()
    for layer, part in zip(structs, layers, strict=True):
        for name in kernel.LAYER_WEIGHTS:
            linear = cpp_kernel(getattr(part, name))
            setattr(layer, name, kernel.Weight.of(linear.weight))
            setattr(layer, f"{name}_bias", None if linear.bias is None else linear.bias.data_ptr())
        for name in ("before_attention", "after_attention", "before_mlp", "after_mlp"):
            norm = getattr(part, f"norm_{name}")
            setattr(layer, name, None if norm is None else norm.weight.data_ptr())
        heads, layer.window = part.heads, part.window or 0
        layer.heads = None if heads.weight is None else heads.weight.data_ptr()
        if heads.rope is not None:
            cosine, sine = rotations[heads.rope]
            layer.cosine, layer.sine, layer.rope_half = cosine.data_ptr(), sine.data_ptr(), cosine.shape[1]
    return structs


def cpp_kernel(linear: nn.Module) -> CppKernel | None:
    """Our C++ kernel of a linear layer, if that runs it."""
    if isinstance(linear, RowExactLinear) and isinstance(linear.kernel, CppKernel) and not linear.scheme.upcast:
        return linear.kernel
    return linear.cpp if isinstance(linear, FastLinear) else None


def linears_of(layers: Iterable[FlatLayer]) -> list[nn.Module]:
    """The linear layers of decoder layers, in the order in which a pass reads them."""
    return [linear for layer in layers for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)]


def is_all_cpp(layers: Iterable[FlatLayer], others: Iterable[nn.Module]) -> bool:
    """Whether all operations of a decoder are our C++ kernels: of its layers, and its other linear ones."""
    layers = list(layers)
    if not all(isinstance(layer.gate, CppGate) for layer in layers):
        return False
    return all(cpp_kernel(linear) is not None for linear in (*linears_of(layers), *others))
