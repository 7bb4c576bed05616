"""What calls into our C++ kernels share: pools by their addresses, and what is asked and found in ints."""

from __future__ import annotations

import ctypes
import math
import weakref
from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from specpaged.modeling.flat.config import FlatConfig
from specpaged.modeling.forward_output import GreedyTokens
from specpaged.modeling.ragged_batch import RaggedRow
from specpaged.paging.kv_cache import PagedKVCache
from specpaged.speculation.stop_rule import StopRule
from specpaged_kernels.cpu import decoder as kernel
from specpaged_kernels.cpu.library import KV_STORAGE, check_status, check_tensor
from specpaged_kernels.cpu.paged_attention import Pass

T = TypeVar("T")


class Pools:
    """The KV pools of a model's layers, which are looked at once, and again when they are others."""

    def __init__(self, config: FlatConfig, dtype: torch.dtype):
        self.config = config
        self.dtype = dtype  # of the arithmetic
        self.num_slots = 0
        self.kv_dtype = dtype
        self._seen: list[tuple[weakref.ref, int]] = []  # the pools of the last pass, and their addresses
        self._geometries: dict[tuple[int, int, int], Pass] = {}  # on these pools
        self._kept: dict[tuple[int, int], Any] = {}  # by the id of a geometry, one of these, and a number of ids

    def addresses(self, kv_layers: Sequence[Tensor]) -> ctypes.Array:
        """Of each layer's pool. Raises ValueError where they are none of the model's."""
        if not (len(kv_layers) == len(self._seen) and all(map(_is_seen, kv_layers, self._seen))):
            config, num_layers, num_slots = self.config, len(self.config.layers), len(kv_layers[0])
            if len(kv_layers) != num_layers:
                raise ValueError(f"kv_layers has {len(kv_layers)} pools; allowed: {num_layers}, one per layer")
            shape = (num_slots, 2, config.num_kv_heads, config.head_dim)
            kv_dtype = kv_layers[0].dtype if kv_layers[0].dtype in KV_STORAGE else self.dtype
            for pool in kv_layers:
                check_tensor("kv_layers", pool, shape, kv_dtype)
            self.num_slots, self.kv_dtype, self._geometries, self._kept = num_slots, kv_dtype, {}, {}
            self._seen = [(weakref.ref(pool), pool.data_ptr()) for pool in kv_layers]
            self._addresses = (ctypes.c_void_p * num_layers)(*(address for _, address in self._seen))
        return self._addresses

    def geometry(self, kv_cache: PagedKVCache) -> Pass:
        """What all passes on these pools share, behind `addresses`."""
        block_size, block_stride, num_threads = key = (
            kv_cache.block_size, kv_cache.block_stride, torch.get_num_threads()
        )  # fmt: skip
        geometry = self._geometries.get(key)
        if geometry is None:
            config = self.config
            scaling = 1 / math.sqrt(config.head_dim) if config.scaling is None else config.scaling
            geometry = self._geometries[key] = Pass(
                block_size=block_size, block_stride=block_stride, num_slots=self.num_slots,
                num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim,
                kv_storage=KV_STORAGE[self.kv_dtype], num_threads=num_threads, scaling=scaling,
                softcap=config.softcap or 0.0,
            )  # fmt: skip
        return geometry

    def kept(self, kv_cache: PagedKVCache, num_ids: int, make: Callable[[], T]) -> T:
        """What is made once of these pools for so many ids, and again when they are others."""
        self.addresses(kv_cache.layers)
        key = id(self.geometry(kv_cache)), num_ids
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


def greedy(
    function: Callable[..., int],
    struct: ctypes.Structure,
    pools: Pools,
    kv_cache: PagedKVCache,
    rows: Sequence[RaggedRow],
    num_ids: int,
    num_further: Sequence[int],
    wants_logprobs: bool,
    stop_rule: StopRule | None,
    beside: int | None = None,
) -> list[GreedyTokens]:
    """What ModelRunner.greedy says. All is asked and answered in ints: tensors would take longer than the call.

    `beside` is the address of the function's last argument.
    """
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
    addresses = pools.addresses(kv_cache.layers)
    geometry = pools.geometry(kv_cache)
    total = sum(counts)
    token_ids, logprobs = array("q", bytes(8 * total)), array("f", bytes(4 * total))
    num_done = ctypes.c_int64()
    rule = None if stop_rule is None else stop_rule_struct(stop_rule)
    status = function(
        ctypes.addressof(struct), ctypes.addressof(geometry), ctypes.addressof(addresses),
        asked.buffer_info()[0], len(asked), len(rows), num_ids, wants_logprobs,
        None if rule is None else ctypes.addressof(rule),
        token_ids.buffer_info()[0], logprobs.buffer_info()[0], ctypes.addressof(num_done), beside,
    )  # fmt: skip
    check_status(status)
    found, start = [], 0
    for count in counts[: num_done.value]:
        found.append(GreedyTokens(token_ids[start : start + count].tolist(), logprobs[start : start + count].tolist()))
        start += count
    return found


def stop_rule_struct(rule: StopRule) -> kernel.StopRule:
    """The rule as the C++ code reads it. Raises ValueError where it is not whole."""
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
