"""Paged attention in plain torch: blocks are gathered into a scratch buffer, and counted; dense rows are views."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor
from typing_extensions import override

from specpaged.modeling.attention.base import PagedPass
from specpaged.modeling.attention.folded import attend_chunked, attend_sdpa
from specpaged.modeling.numerics import AttentionScheme
from specpaged.modeling.ragged_batch import RaggedBatch
from specpaged_kernels.kv_storage import as_stored


def store(pool: Tensor, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
    """Write key and value, [num_rows, Hkv, D] each, to the slots [N] of pool [P * S, 2, Hkv, D]: rows 0 .. N-1."""
    for i, new in enumerate((key, value)):
        slots, stored = pool[:, i], as_stored(new[: len(slot_mapping)], pool.dtype)
        if pool.itemsize == 1:  # which index_copy_ knows as integers alone
            slots, stored = slots.view(torch.uint8), stored.view(torch.uint8)
        slots.index_copy_(0, slot_mapping, stored)


@lru_cache(maxsize=64)
def _row_tokens(start: int, stop: int, heads: int, padded: int, device: torch.device) -> Tensor:
    """[padded] int64: the query token of each folded row; filler rows have the last one's."""
    rows = torch.arange(start * heads, start * heads + padded, device=device)
    return (rows // heads).clamp_(max=stop - 1)


@lru_cache(maxsize=64)
def _block_and_offset(width: int, num_blocks: int, block_size: int, device: torch.device) -> tuple[Tensor, ...]:
    """[width] int64 each: position, the page table entry that holds it, its place in the block."""
    positions = torch.arange(width, device=device)
    return positions, (positions // block_size).clamp_(max=num_blocks - 1), positions % block_size


@dataclass
class _Workspace:
    """A piece's buffers for layers of one geometry; every layer of a pass uses them in turn."""

    folded: Tensor  # [G, Hkv, R, D]; filler rows are zero
    query: Tensor  # view of folded: [G, T, Hkv, Hq / Hkv, D]
    output: Tensor  # view of the pass's output, or of the group's: [G, T, Hkv, Hq / Hkv, D]


@dataclass
class _Piece:
    """Query tokens start .. stop-1 (T of them) of each sequence of a group, in one call."""

    start: int
    stop: int
    bucket: int  # L: their KV length, rounded up
    workspaces: dict[tuple[int, int, int], _Workspace] = field(default_factory=dict)  # (Hq, Hkv, D)
    masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)  # (Hq / Hkv, window): [G, 1, R, L]


@dataclass
class _Group:
    """Sequences with as many query tokens and the same KV bucket: one call for all of them."""

    num_seqs: int  # G
    query_len: int
    context_lens: Tensor  # [G] int64
    tokens: slice | Tensor  # their rows of N: [G * query_len] int64 where they are not consecutive
    # [G * L] int64, the null block's where a position is past the sequence's length; or the slots of a dense row.
    slots: Tensor | slice
    bucket: int  # L
    pieces: list[_Piece]
    tail: slice | None  # slots of a dense row past the sequence's length, to be zeros
    outputs: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)  # where tokens are not consecutive


class TorchPass(PagedPass):
    """A PagedPass in torch. Sequences with as many query tokens and KV of about one length share a call."""

    def __init__(
        self,
        batch: RaggedBatch,
        num_rows: int,
        kv_layers: Sequence[Tensor],  # per layer [P * S, 2, Hkv, D]
        scheme: AttentionScheme,
        dtype: torch.dtype,
    ):
        self.num_tokens = batch.num_tokens
        self.num_rows = num_rows
        self.kv_layers = kv_layers
        self.scheme = scheme
        self.dtype = dtype
        self.compute_dtype = torch.float32 if scheme.upcast else dtype
        self.slot_mapping = batch.slot_mapping
        self.device = batch.token_ids.device
        self.gathered_bytes = 0
        # One buffer per geometry for all layers: a layer's output is read before the next layer writes. Filler rows
        # stay zero.
        self._outputs: dict[tuple[int, int, int], Tensor] = {}
        self._groups = self._plan(batch)

    def _plan(self, batch: RaggedBatch) -> list[_Group]:
        scheme = self.scheme
        members: dict[tuple[int, ...], list[int]] = {}
        dense = batch.block_stride != batch.block_size
        starts, start, lengths = [], 0, []
        for i, (query_len, context_len) in enumerate(zip(batch.query_lens, batch.context_lens_host, strict=True)):
            starts.append(start)
            start += query_len
            lengths.append(context_len + query_len)
            if query_len:
                # What takes several pieces shares nothing: its pieces have buckets of their own. A dense row is a view.
                alone = (i,) if query_len > scheme.query_piece or dense else ()
                members.setdefault((query_len, scheme.kv_bucket(lengths[i]), *alone), []).append(i)
        if dense:  # one block for each sequence
            firsts = (batch.page_table[:, 0].long() * batch.block_stride).tolist()
        else:
            slots = self._slots(batch, max(bucket for _, bucket, *_ in members), lengths)
        groups = []
        for (query_len, bucket, *_), seqs in members.items():
            if seqs[-1] - seqs[0] == len(seqs) - 1:
                tokens = slice(starts[seqs[0]], starts[seqs[0]] + len(seqs) * query_len)
                which: slice | Tensor = slice(seqs[0], seqs[-1] + 1)
            else:
                tokens = torch.tensor([starts[i] + t for i in seqs for t in range(query_len)], device=self.device)
                which = torch.tensor(seqs, device=self.device)
            tail = None
            if dense:
                first_slot = firsts[seqs[0]]
                group_slots: slice | Tensor = slice(first_slot, first_slot + bucket)
                tail = slice(first_slot + lengths[seqs[0]], first_slot + bucket)
            else:
                group_slots = slots[which, :bucket].reshape(-1)
            contexts = [batch.context_lens_host[i] for i in seqs]
            pieces = []
            for first in range(0, query_len, scheme.query_piece):
                last = min(first + scheme.query_piece, query_len)
                pieces.append(_Piece(first, last, scheme.kv_bucket(max(contexts) + last)))
            groups.append(
                _Group(
                    num_seqs=len(seqs),
                    query_len=query_len,
                    context_lens=torch.tensor(contexts, device=self.device),
                    tokens=tokens,
                    slots=group_slots,
                    tail=tail,
                    bucket=bucket,
                    pieces=pieces,
                )
            )
        return groups

    def _slots(self, batch: RaggedBatch, width: int, lengths: list[int]) -> Tensor:
        """[B, width] int64: the slot of every position; slot 0, which is zeros, past a sequence's length."""
        table = batch.page_table.long()
        positions, blocks, offsets = _block_and_offset(width, table.shape[1], batch.block_size, self.device)
        slots = (table * batch.block_stride).index_select(1, blocks).add_(offsets)
        return slots.mul_(positions < torch.tensor(lengths, device=self.device)[:, None])

    def _mask(self, group: _Group, piece: _Piece, heads: int, window: int | None) -> Tensor:
        """[G, 1, R, L]; a filler row reads what the piece's last token reads."""
        mask = piece.masks.get((heads, window))
        if mask is None:
            padded = self.scheme.padded_rows((piece.stop - piece.start) * heads)
            tokens = _row_tokens(piece.start, piece.stop, heads, padded, self.device)
            last = (group.context_lens[:, None] + tokens).view(group.num_seqs, 1, padded, 1)
            position = torch.arange(piece.bucket, device=self.device)
            hidden = position > last
            if window is not None:
                hidden |= position <= last - window
            mask = torch.zeros(hidden.shape, dtype=self.compute_dtype, device=self.device)
            mask.masked_fill_(hidden, float("-inf"))
            piece.masks[heads, window] = mask
        return mask

    def _output(self, geometry: tuple[int, int, int]) -> Tensor:
        """[num_rows, Hkv, Hq / Hkv, D]"""
        output = self._outputs.get(geometry)
        if output is None:
            num_heads, num_kv_heads, head_dim = geometry
            shape = (self.num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
            output = self._outputs[geometry] = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return output

    def _workspace(self, group: _Group, piece: _Piece, geometry: tuple[int, int, int]) -> _Workspace:
        workspace = piece.workspaces.get(geometry)
        if workspace is None:
            num_heads, num_kv_heads, head_dim = geometry
            heads = num_heads // num_kv_heads
            num_seqs, tokens = group.num_seqs, piece.stop - piece.start
            rows = tokens * heads
            shape = (num_seqs, group.query_len, num_kv_heads, heads, head_dim)
            if isinstance(group.tokens, slice):
                output = self._output(geometry)[group.tokens].view(shape)
            else:
                output = group.outputs.get(geometry)
                if output is None:
                    output = torch.empty(shape, dtype=self.dtype, device=self.device)
                    group.outputs[geometry] = output
            folded = torch.zeros(
                (num_seqs, num_kv_heads, self.scheme.padded_rows(rows), head_dim),
                dtype=self.compute_dtype,
                device=self.device,
            )
            unfolded = folded[:, :, :rows].view(num_seqs, num_kv_heads, tokens, heads, head_dim)
            workspace = _Workspace(folded, unfolded.transpose(1, 2), output[:, piece.start : piece.stop])
            piece.workspaces[geometry] = workspace
        return workspace

    @override
    def attend(
        self,
        layer_idx: int,
        query: Tensor,  # [num_rows, Hq, D]
        key: Tensor,  # [num_rows, Hkv, D]
        value: Tensor,
        scaling: float | None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,  # [Hq]
    ) -> Tensor:
        pool = self.kv_layers[layer_idx]
        num_heads, head_dim = query.shape[1:]
        num_kv_heads = key.shape[1]
        heads = num_heads // num_kv_heads
        geometry = (num_heads, num_kv_heads, head_dim)
        store(pool, key, value, self.slot_mapping)
        rows = query.view(self.num_rows, num_kv_heads, heads, head_dim)
        for group in self._groups:
            if group.tail is None:
                gathered = pool.index_select(0, group.slots)
                self.gathered_bytes += gathered.nbytes
            else:
                pool[group.tail].zero_()
                gathered = pool[group.slots]
            gathered = gathered.to(self.compute_dtype).view(group.num_seqs, group.bucket, 2, num_kv_heads, head_dim)
            keys, values = gathered.permute(2, 0, 3, 1, 4).unbind(0)  # [G, Hkv, L, D]
            group_query = rows[group.tokens].view(group.num_seqs, group.query_len, num_kv_heads, heads, head_dim)
            for piece in group.pieces:
                workspace = self._workspace(group, piece, geometry)
                whole = len(group.pieces) == 1
                workspace.query.copy_(group_query if whole else group_query[:, piece.start : piece.stop])
                attended = self._attend_folded(
                    workspace.folded,
                    keys if whole else keys[:, :, : piece.bucket],
                    values if whole else values[:, :, : piece.bucket],
                    self._mask(group, piece, heads, window),
                    scaling,
                    softcap,
                    sinks,
                )
                tokens = piece.stop - piece.start
                attended = attended[:, :, : tokens * heads].view(-1, num_kv_heads, tokens, heads, head_dim)
                workspace.output.copy_(attended.transpose(1, 2))
            if not isinstance(group.tokens, slice):
                self._output(geometry).index_copy_(0, group.tokens, group.outputs[geometry].flatten(0, 1))
        return self._output(geometry).view(self.num_rows, num_heads, head_dim)

    def _attend_folded(
        self,
        folded: Tensor,  # [G, Hkv, R, D]
        keys: Tensor,  # [G, Hkv, L, D]
        values: Tensor,
        mask: Tensor,  # [G, 1, R, L]
        scaling: float | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """[G, Hkv, R, D]"""
        if softcap is None and sinks is None and self.scheme.kernel == "sdpa":
            return attend_sdpa(folded, keys, values, mask, scaling)
        if sinks is not None:
            # Row t * (Hq / Hkv) + h has head h's sink; a filler row has any.
            num_kv_heads, rows = folded.shape[1:3]
            sinks = sinks.float().view(num_kv_heads, -1)
            sinks = sinks.repeat(1, -(-rows // sinks.shape[1]))[:, :rows]
        return attend_chunked(folded, keys, values, mask, scaling, softcap, sinks)
