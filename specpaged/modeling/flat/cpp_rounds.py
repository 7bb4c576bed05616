"""Rounds of greedy decoding in one call of our C++ kernels: see rounds.cpp."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence

import torch

from specpaged.modeling.flat.cpp_calls import Pools, stop_rule_struct
from specpaged.modeling.forward_output import HiddenStates, HiddenStatesRequest
from specpaged.modeling.rounds import DecodingRow, Rounds
from specpaged.paging.kv_cache import PagedKVCache
from specpaged.speculation.stop_rule import StopRule
from specpaged_kernels.cpu import rounds as kernel
from specpaged_kernels.cpu.decoder import StopRule as StopRuleStruct
from specpaged_kernels.cpu.library import check_status


class RoundsModel:
    """A decoder, or heads that read the target, on their pools, of which they find the first num_ids ids."""

    def __init__(
        self,
        function: Callable[..., int],
        struct: ctypes.Structure,
        pools: Pools,
        kv_cache: PagedKVCache,
        num_ids: int,
        reads: HiddenStatesRequest | None = None,
        hidden_size: int = 0,
        dtype: torch.dtype = torch.float32,
    ):
        addresses, geometry = pools.addresses(kv_cache.layers), pools.geometry(kv_cache)
        self.reads, self.hidden_size, self.dtype = reads, hidden_size, dtype
        layer_inputs = () if reads is None else reads.layer_inputs
        self._kept = addresses, geometry, struct, (ctypes.c_int64 * len(layer_inputs))(*layer_inputs)
        self.struct = kernel.Model(
            ctypes.cast(function, ctypes.c_void_p).value, ctypes.addressof(struct), ctypes.addressof(geometry),
            ctypes.addressof(addresses), num_ids, int(reads is not None and reads.last), len(layer_inputs),
            ctypes.addressof(self._kept[-1]), hidden_size * dtype.itemsize,
        )  # fmt: skip

    @property
    def num_features(self) -> int:
        """Of a token, that it reads."""
        return 0 if self.reads is None else self.hidden_size * (self.reads.last + len(self.reads.layer_inputs))

    def hidden_states(self, features: torch.Tensor) -> HiddenStates:
        """Those of rows [R, num_features]: side by side, layer inputs before the last one."""
        parts = list(features.split(self.hidden_size, dim=-1))
        return HiddenStates(parts.pop() if self.reads.last else None, tuple(parts))


def run_rounds(
    rows: Sequence[DecodingRow],
    target: RoundsModel,
    num_rounds: int,
    draft: RoundsModel | None,
    stop_rule: StopRule | None,
    goes_on: bool,
    tells_found: bool,
) -> Rounds:
    """What ModelRunner.rounds says."""
    asked, num_drafts, num_tokens = _asked(rows)
    num_seqs = len(rows)
    room = 2 + num_rounds + num_seqs * (5 + 4 * num_rounds) + num_tokens + num_rounds * num_drafts
    room += sum([len(row.draft) for row in rows])
    choices = _Choices(rows, tells_found) if any([row.choice is not None for row in rows]) else None
    num_told = 0 if choices is None or not tells_found else choices.struct.num_lookups
    room += num_told * (num_seqs * num_rounds + num_tokens)
    found, beside = array("q", bytes(8 * room)), array("f", bytes(4 * room))
    seconds = array("d", bytes(16 * (num_rounds + 1)))
    features = None
    if draft is not None and draft.num_features:
        features = torch.empty(num_tokens, draft.num_features, dtype=draft.dtype)
    num_done, num_written = ctypes.c_int64(), ctypes.c_int64()
    rule = None if stop_rule is None else stop_rule_struct(stop_rule)
    status = kernel.function()(
        ctypes.addressof(target.struct), None if draft is None else ctypes.addressof(draft.struct),
        None if rule is None else ctypes.addressof(rule), None if choices is None else ctypes.addressof(choices.struct),
        num_rounds, goes_on,
        asked.buffer_info()[0], len(asked), num_seqs, found.buffer_info()[0], beside.buffer_info()[0], room,
        None if features is None else features.data_ptr(), seconds.buffer_info()[0], ctypes.addressof(num_done),
        ctypes.addressof(num_written),
    )  # fmt: skip
    check_status(status)
    rounds = Rounds(num_done.value, num_seqs, found[: num_written.value].tolist(), beside, seconds, num_told)
    if any(rounds.num_unread):
        states = draft.hidden_states(features[: sum(rounds.num_unread)])
        rounds.unread = states.split(rounds.num_unread)
    return rounds


def _asked(rows: Sequence[DecodingRow]) -> tuple[array[int], int, int]:
    """The rows as decoding.h reads them; and how many drafts a further round has at most, and tokens come in all."""
    ints: list[int] = []
    num_drafts = num_tokens = 0
    for (
        token_ids, start, draft_context_len, drafts, num_draft_tokens, most_tokens, stop_ids, blocks, lookup, choice, _,
        draft_blocks, num_skipped,
    ) in rows:  # fmt: skip
        own_blocks = () if draft_blocks is None or draft_blocks is blocks else draft_blocks
        ints += (
            len(token_ids), start, draft_context_len, len(drafts), num_draft_tokens, most_tokens, len(stop_ids),
            len(blocks), lookup, len(own_blocks), num_skipped,
        )  # fmt: skip
        ints += token_ids
        ints += drafts
        ints += stop_ids
        ints += blocks
        ints += own_blocks
        num_drafts += num_draft_tokens if choice is None else max(num_draft_tokens, choice.num_tokens)
        num_tokens += most_tokens
    return array("q", ints), num_drafts, num_tokens  # of the list, nothing is in the caches behind the call


class _Choices:
    """The choices of rows, as the C++ code reads them; what they lead to lives as long as this."""

    def __init__(self, rows: Sequence[DecodingRow], tells: bool):
        choices = [row.choice for row in rows]
        some = next(choice for choice in choices if choice is not None)
        num_seqs, num_lookups = len(rows), len(next(row.lookups for row in rows if row.choice is not None))
        structs = [stop_rule_struct(some.rule(lookup)[0]) for lookup in range(num_lookups)]
        rules = (StopRuleStruct * num_lookups)(*structs)
        of_rows = [0 if choice is None else choice.rule(0)[1] for choice in choices]
        most = [0 if choice is None else choice.num_tokens for choice in choices]
        least = [0.0 if choice is None else choice.least for choice in choices]
        addresses = [address for row in rows for address in (row.lookups or [None] * num_lookups)]
        self._kept = structs, rules
        self.struct = kernel.Choices(
            num_lookups, rules, (ctypes.c_int64 * num_seqs)(*of_rows), (ctypes.c_int64 * num_seqs)(*most),
            (ctypes.c_double * num_seqs)(*least), (ctypes.c_void_p * len(addresses))(*addresses),
            tells,
        )  # fmt: skip
