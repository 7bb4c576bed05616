"""The flat decoder in one call, where all of its operations are our C++ kernels."""

from __future__ import annotations

import ctypes
import math
import weakref
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override

from specpaged.modeling.attention.base import PagedPass
from specpaged.modeling.attention.cpp_pass import CppPass
from specpaged.modeling.flat.config import FlatConfig
from specpaged.modeling.flat.decoder import FlatDecoder
from specpaged.modeling.flat.row_wise import CppGate
from specpaged.modeling.forward_output import ForwardOutput, ForwardRequest, GreedyTokens, HiddenStates
from specpaged.modeling.linear import CPP_ROWS, CppKernel, FastLinear, RowExactLinear
from specpaged.modeling.ragged_batch import RaggedBatch, RaggedRow
from specpaged.modeling.rounds import DecodingRow, Rounds
from specpaged.paging.kv_cache import PagedKVCache
from specpaged.speculation.stop_rule import StopRule
from specpaged_kernels.cpu import decoder as kernel
from specpaged_kernels.cpu import rounds as rounds_kernel
from specpaged_kernels.cpu.library import STORAGE, check_status, check_tensor
from specpaged_kernels.cpu.paged_attention import Pass, make_pass


class CppDecoder(nn.Module):
    """A Decoder (see `source`) that computes what `decoder` does, bit for bit, in one call.

    A fast decoder that has stock kernels for many rows runs those itself.
    """

    def __init__(self, config: FlatConfig, decoder: FlatDecoder):
        super().__init__()
        self.config = config
        self.decoder = decoder
        self.most_rows = None if isinstance(decoder.output, RowExactLinear) else CPP_ROWS
        self._function = kernel.functions()[decoder.dtype]
        self._greedy_function = kernel.greedy_functions()[decoder.dtype]
        self._greedy_address = ctypes.cast(self._greedy_function, ctypes.c_void_p).value
        self._seen: list[tuple[weakref.ref, int]] = []  # the pools of the last pass, and their addresses
        self._geometries: dict[tuple[int, int, int], Pass] = {}  # on these pools
        self._models: dict[int, rounds_kernel.Model] = {}  # by the id of a geometry, one of these
        self._layers = (kernel.Layer * len(decoder.layers))()
        for layer, part in zip(self._layers, decoder.layers, strict=True):
            for name in kernel.LAYER_WEIGHTS:
                weight, bias = cpp_operands(getattr(part, name))
                setattr(layer, name, kernel.Weight.of(weight))
                setattr(layer, f"{name}_bias", None if bias is None else bias.data_ptr())
            for name in ("before_attention", "after_attention", "before_mlp", "after_mlp"):
                norm = getattr(part, f"norm_{name}")
                setattr(layer, name, None if norm is None else norm.weight.data_ptr())
            heads, layer.window = part.heads, part.window or 0
            layer.heads = None if heads.weight is None else heads.weight.data_ptr()
            if heads.rope is not None:
                cosine, sine = (getattr(decoder, f"{heads.rope}_{name}") for name in ("cos", "sin"))
                layer.cosine, layer.sine, layer.rope_half = cosine.data_ptr(), sine.data_ptr(), cosine.shape[1]
        self._struct = kernel.Decoder(
            len(decoder.layers), decoder.num_positions, config.vocab_size, config.hidden_size,
            config.intermediate_size, config.num_heads, config.num_kv_heads, config.head_dim,
            int(decoder.layers[0].gate.activation == "gelu_tanh"),
            config.norm_eps, config.residual_multiplier, decoder.embedding_multiplier, self._layers,
            decoder.embedding.data_ptr(), STORAGE[decoder.embedding.dtype],
            kernel.Weight.of(cpp_operands(decoder.output)[0]), decoder.final_norm.weight.data_ptr(),
        )  # fmt: skip

    @override
    def forward(
        self, token_ids: Tensor, positions: Tensor, paged_pass: PagedPass, request: ForwardRequest
    ) -> ForwardOutput:
        num_rows, logits_idx = token_ids.shape[0], request.logits_idx
        if not isinstance(paged_pass, CppPass) or (self.most_rows is not None and num_rows > self.most_rows):
            return self.decoder(token_ids, positions, paged_pass, request)
        pools = self._pools(paged_pass.kv_layers)
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
                layer_inputs.data_ptr(), None if last is None else last.data_ptr(),
            )  # fmt: skip
        status = self._function(
            ctypes.addressof(self._struct), ctypes.addressof(call), ctypes.addressof(pools),
            token_ids.data_ptr(), positions.data_ptr(),
            None if logits_idx is None else logits_idx.data_ptr(), num_logits, logits.data_ptr(),
            None if struct is None else ctypes.addressof(struct),
        )  # fmt: skip
        check_status(status)
        return ForwardOutput(self.decoder.finished(logits), None, hidden_states)

    def runs_greedy(self, num_rows: int) -> bool:
        """Whether `greedy` can make passes of up to num_rows rows."""
        return self.decoder.keeps_order and (self.most_rows is None or num_rows <= self.most_rows)

    def greedy(
        self,
        rows: Sequence[RaggedRow],
        kv_cache: PagedKVCache,
        num_ids: int,
        num_further: Sequence[int],
        wants_logprobs: bool,
        stop_rule: StopRule | None,
    ) -> list[GreedyTokens]:
        """What ModelRunner.greedy says. All is asked and answered in ints: tensors would take longer than the call."""
        ints: list[int] = []
        counts = [0] * (1 + max(num_further))  # of the tokens that each pass finds
        for row, further in zip(rows, num_further, strict=True):
            token_ids, blocks, num_logits = row.token_ids, row.blocks, row.num_logits
            ints += (len(token_ids), row.context_len, num_logits, further, len(blocks))
            ints += token_ids
            ints += blocks
            counts[0] += num_logits
            for step in range(further):
                counts[1 + step] += 1
        asked = array("q", ints)
        pools = self._pools(kv_cache.layers)
        geometry = self._geometry(kv_cache)
        total = sum(counts)
        token_ids, logprobs = array("q", bytes(8 * total)), array("f", bytes(4 * total))
        num_done = ctypes.c_int64()
        rule = None if stop_rule is None else _stop_rule(stop_rule)
        status = self._greedy_function(
            ctypes.addressof(self._struct), ctypes.addressof(geometry), ctypes.addressof(pools),
            asked.buffer_info()[0], len(asked), len(rows), num_ids, wants_logprobs,
            None if rule is None else ctypes.addressof(rule),
            token_ids.buffer_info()[0], logprobs.buffer_info()[0], ctypes.addressof(num_done),
        )  # fmt: skip
        check_status(status)
        found, start = [], 0
        for count in counts[: num_done.value]:
            found.append(
                GreedyTokens(token_ids[start : start + count].tolist(), logprobs[start : start + count].tolist())
            )
            start += count
        return found

    def rounds(
        self,
        rows: Sequence[DecodingRow],
        kv_cache: PagedKVCache,
        num_ids: int,
        num_rounds: int,
        draft: tuple[CppDecoder, PagedKVCache] | None,
        stop_rule: StopRule | None,
        goes_on: bool,
    ) -> Rounds:
        """What ModelRunner.rounds says."""
        ints: list[int] = []
        num_seqs = len(rows)
        room = 2 + num_rounds + num_seqs * (3 + 3 * num_rounds)
        for (
            token_ids, start, draft_context_len, drafts, num_draft_tokens, most_tokens, stop_ids, blocks, lookup
        ) in rows:  # fmt: skip
            ints += (
                len(token_ids), start, draft_context_len, len(drafts), num_draft_tokens, most_tokens, len(stop_ids),
                len(blocks), lookup,
            )  # fmt: skip
            ints += token_ids
            ints += drafts
            ints += stop_ids
            ints += blocks
            room += most_tokens + len(drafts) + num_rounds * num_draft_tokens
        asked, found, beside = array("q", ints), array("q", bytes(8 * room)), array("f", bytes(4 * room))
        del ints  # behind the call, nothing of it is in the caches
        seconds = array("d", bytes(16 * (num_rounds + 1)))
        num_done, num_written = ctypes.c_int64(), ctypes.c_int64()
        target = self._model(kv_cache)
        drafting = None if draft is None else draft[0]._model(draft[1])
        rule = None if stop_rule is None else _stop_rule(stop_rule)
        status = rounds_kernel.function()(
            ctypes.addressof(target), None if drafting is None else ctypes.addressof(drafting),
            None if rule is None else ctypes.addressof(rule), num_ids, num_rounds, goes_on,
            asked.buffer_info()[0], len(asked), num_seqs, found.buffer_info()[0], beside.buffer_info()[0], room,
            seconds.buffer_info()[0], ctypes.addressof(num_done), ctypes.addressof(num_written),
        )  # fmt: skip
        check_status(status)
        return Rounds(num_done.value, num_seqs, found[: num_written.value].tolist(), beside, seconds)

    def _model(self, kv_cache: PagedKVCache) -> rounds_kernel.Model:
        """This decoder on these pools, which it keeps."""
        pools, geometry = self._pools(kv_cache.layers), self._geometry(kv_cache)
        model = self._models.get(id(geometry))
        if model is None:
            addresses = map(ctypes.addressof, (self._struct, geometry, pools))
            model = self._models[id(geometry)] = rounds_kernel.Model(self._greedy_address, *addresses)
        return model

    def _pools(self, kv_layers: Sequence[Tensor]) -> ctypes.Array:
        """Their addresses. They are looked at once, and again when they are others."""
        if not (len(kv_layers) == len(self._seen) and all(map(_is_seen, kv_layers, self._seen))):
            if len(kv_layers) != len(self._layers):
                raise ValueError(f"kv_layers has {len(kv_layers)} pools; allowed: {len(self._layers)}, one per layer")
            config, num_slots = self.config, len(kv_layers[0])
            shape = (num_slots, 2, config.num_kv_heads, config.head_dim)
            kv_dtype = kv_layers[0].dtype if kv_layers[0].dtype in STORAGE else self.decoder.dtype
            for pool in kv_layers:
                check_tensor("kv_layers", pool, shape, kv_dtype)
            self._num_slots, self._kv_dtype, self._geometries, self._models = num_slots, kv_dtype, {}, {}
            self._seen = [(weakref.ref(pool), pool.data_ptr()) for pool in kv_layers]
            self._addresses = (ctypes.c_void_p * len(self._layers))(*(address for _, address in self._seen))
        return self._addresses

    def _call(self, batch: RaggedBatch, num_rows: int) -> Pass:
        """Behind `_pools`: the pass is checked against the pools that this has seen."""
        config = self.config
        return make_pass(
            num_rows, self._num_slots, batch.slot_mapping, batch.page_table, batch.cu_query_lens, batch.context_lens,
            batch.block_size, config.num_heads, config.num_kv_heads, config.head_dim, config.scaling, config.softcap,
            block_stride=batch.block_stride, kv_dtype=self._kv_dtype,
        )  # fmt: skip

    def _geometry(self, kv_cache: PagedKVCache) -> Pass:
        """What all passes on these pools share, behind `_pools`."""
        block_size, block_stride, num_threads = key = (
            kv_cache.block_size, kv_cache.block_stride, torch.get_num_threads()
        )  # fmt: skip
        geometry = self._geometries.get(key)
        if geometry is None:
            config = self.config
            scaling = 1 / math.sqrt(config.head_dim) if config.scaling is None else config.scaling
            geometry = self._geometries[key] = Pass(
                block_size=block_size, block_stride=block_stride, num_slots=self._num_slots,
                num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim,
                kv_storage=STORAGE[self._kv_dtype], num_threads=num_threads, scaling=scaling,
                softcap=config.softcap or 0.0,
            )  # fmt: skip
        return geometry


def _stop_rule(rule: StopRule) -> kernel.StopRule:
    if len(rule.expected) != len(rule.leads):
        raise ValueError(
            f"expected has {len(rule.expected)} entries; allowed: {len(rule.leads)}, one for each of leads"
        )
    intercepts, leads, expected = (
        (ctypes.c_double * len(values))(*values) for values in (rule.intercepts, rule.leads, rule.expected)
    )
    return kernel.StopRule(
        rule.slope, rule.row_tokens, rule.pass_tokens, intercepts, len(intercepts), leads, expected, len(leads)
    )


def _is_seen(pool: Tensor, seen: tuple[weakref.ref, int]) -> bool:
    return seen[0]() is pool and seen[1] == pool.data_ptr()


def cpp_operands(linear: nn.Module) -> tuple[Tensor, Tensor | None] | None:
    """A linear layer's packed weight and bias, if our C++ kernel runs it."""
    if isinstance(linear, RowExactLinear) and isinstance(linear.kernel, CppKernel) and not linear.scheme.upcast:
        return linear.kernel.weight, linear.kernel.bias
    if isinstance(linear, FastLinear) and linear.cpp is not None:
        return linear.cpp, linear.bias
    return None


def is_all_cpp(decoder: FlatDecoder) -> bool:
    """Whether all operations of the decoder are our C++ kernels, so that CppDecoder can stand for it."""
    linears = [decoder.output]
    for layer in decoder.layers:
        linears += (layer.qkv, layer.o, layer.gate_up, layer.down)
        if not isinstance(layer.gate, CppGate):
            return False
    return all(cpp_operands(linear) is not None for linear in linears)
