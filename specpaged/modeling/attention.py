"""The attention hook: any HF decoder, packed [1, N], on paged KV.

Models are loaded with attn_implementation=HOOK. No mask function is registered under that name, so transformers builds
no mask, and the keyword `paged_pass` of a forward call reaches every layer's attention through the model's own code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from specpaged.batch import RaggedBatch
from specpaged.modeling.attention_torch import attend_chunked, attend_sdpa
from specpaged.modeling.numerics import AttentionScheme

HOOK = "specpaged"


def paged_attention_hook(
    module: torch.nn.Module,
    query: Tensor,  # [1, Hq, N, D]
    key: Tensor,  # [1, Hkv, N, D]
    value: Tensor,  # [1, Hkv, N, D]
    attention_mask: Tensor | None,
    *,
    paged_pass: PagedPass,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Returns [1, N, Hq, D], as transformers' attention functions do."""
    return paged_pass.attend(module.layer_idx, query, key, value, scaling, sliding_window, softcap, s_aux), None


AttentionInterface.register(HOOK, paged_attention_hook)


@dataclass
class _Piece:
    """Query tokens start .. stop-1 of each sequence of a group, in one call."""

    start: int
    stop: int
    bucket: int  # L: their KV length, rounded up
    rows: dict[int, int] = field(default_factory=dict)  # heads of a group -> R
    masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)  # (heads of a group, window) -> mask


@dataclass
class _Group:
    """Sequences with as many query tokens and the same KV bucket: one call for all of them."""

    num_seqs: int  # G
    query_len: int
    context_lens: Tensor  # [G] int64
    tokens: slice | Tensor  # their rows of N: [G * query_len] int64 where they are not consecutive
    slots: Tensor  # [G * L] int64, the null block's where a position is past the sequence's length
    bucket: int  # L
    pieces: list[_Piece]


class PagedPass:
    """One forward pass on paged KV: what is written where and read by whom, worked out once for all layers.

    Rows N .. num_rows-1 are filler: nothing of theirs is stored or read, and their output is zeros.
    """

    def __init__(
        self,
        batch: RaggedBatch,
        num_rows: int,
        kv_layers: Sequence[Tensor],
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
        self.gathered_bytes = 0
        self._outputs: dict[tuple[int, int], Tensor] = {}
        self._groups = self._plan(batch)

    def _plan(self, batch: RaggedBatch) -> list[_Group]:
        members: dict[tuple[int, ...], list[int]] = {}
        starts, start = [], 0
        lengths = []
        for i, (query_len, context_len) in enumerate(zip(batch.query_lens, batch.context_lens_host, strict=True)):
            starts.append(start)
            start += query_len
            lengths.append(context_len + query_len)
            if query_len:
                # What takes several pieces shares nothing: its pieces have buckets of their own.
                alone = (i,) if query_len > self.scheme.query_piece else ()
                members.setdefault((query_len, self.scheme.kv_bucket(lengths[i]), *alone), []).append(i)
        slots = self._slots(batch, max(bucket for _, bucket, *_ in members), lengths)
        device = batch.token_ids.device
        groups = []
        for (query_len, bucket, *_), seqs in members.items():
            consecutive = seqs[-1] - seqs[0] == len(seqs) - 1 and all(
                batch.query_lens[i] == query_len for i in range(seqs[0], seqs[-1] + 1)
            )
            if consecutive:
                tokens = slice(starts[seqs[0]], starts[seqs[0]] + len(seqs) * query_len)
                seq_slots = slots[seqs[0] : seqs[-1] + 1, :bucket]
            else:
                tokens = torch.tensor([starts[i] + t for i in seqs for t in range(query_len)], device=device)
                seq_slots = slots[torch.tensor(seqs, device=device), :bucket]
            contexts = [batch.context_lens_host[i] for i in seqs]
            pieces = []
            for first in range(0, query_len, self.scheme.query_piece):
                last = min(first + self.scheme.query_piece, query_len)
                pieces.append(_Piece(first, last, self.scheme.kv_bucket(max(contexts) + last)))
            groups.append(
                _Group(
                    num_seqs=len(seqs),
                    query_len=query_len,
                    context_lens=torch.tensor(contexts, device=device),
                    tokens=tokens,
                    slots=seq_slots.reshape(-1),
                    bucket=bucket,
                    pieces=pieces,
                )
            )
        return groups

    def _slots(self, batch: RaggedBatch, width: int, lengths: list[int]) -> Tensor:
        """[B, width] int64: the slot of every position; slot 0, which is zeros, past a sequence's length."""
        positions = torch.arange(width, device=batch.page_table.device)
        blocks = (positions // batch.block_size).clamp_(max=batch.page_table.shape[1] - 1)
        slots = (batch.page_table * batch.block_size)[:, blocks] + positions % batch.block_size
        valid = positions < torch.tensor(lengths, device=positions.device)[:, None]
        return slots * valid

    def _mask(self, group: _Group, piece: _Piece, heads: int, window: int | None) -> Tensor:
        """[G, 1, R, L]; a filler row reads what the piece's last token reads."""
        mask = piece.masks.get((heads, window))
        if mask is None:
            rows = (piece.stop - piece.start) * heads
            multiple = self.scheme.row_multiple
            padded = -(-rows // multiple) * multiple
            piece.rows[heads] = padded
            device = group.context_lens.device
            token = torch.arange(piece.start * heads, piece.start * heads + padded, device=device) // heads
            last = (group.context_lens[:, None] + token.clamp_(max=piece.stop - 1))[:, None, :, None]
            position = torch.arange(piece.bucket, device=device)
            hidden = position > last
            if window is not None:
                hidden |= position <= last - window
            mask = torch.zeros(hidden.shape, dtype=self.compute_dtype, device=device)
            mask.masked_fill_(hidden, float("-inf"))
            piece.masks[heads, window] = mask
        return mask

    def attend(
        self,
        layer_idx: int,
        query: Tensor,  # [1, Hq, num_rows, D]
        key: Tensor,  # [1, Hkv, num_rows, D]
        value: Tensor,
        scaling: float | None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,  # [Hq]
    ) -> Tensor:
        """Stores the pass's KV in the layer's pool, then attends. Returns [1, num_rows, Hq, D]."""
        pool = self.kv_layers[layer_idx]  # [slots, 2, Hkv, D]
        num_heads, head_dim = query.shape[1], query.shape[3]
        num_kv_heads = key.shape[1]
        heads = num_heads // num_kv_heads
        real = slice(0, self.num_tokens)
        pool[:, 0].index_copy_(0, self.slot_mapping, key[0, :, real].transpose(0, 1))
        pool[:, 1].index_copy_(0, self.slot_mapping, value[0, :, real].transpose(0, 1))
        output = self._outputs.get((num_heads, head_dim))
        if output is None:
            # One buffer for all layers: a layer's output is read before the next layer writes. Filler rows stay zero.
            output = query.new_zeros(self.num_rows, num_kv_heads, heads, head_dim)
            self._outputs[num_heads, head_dim] = output
        rows = query[0].transpose(0, 1).unflatten(1, (num_kv_heads, heads))  # [num_rows, Hkv, Hq / Hkv, D]
        for group in self._groups:
            gathered = pool.index_select(0, group.slots)
            self.gathered_bytes += gathered.numel() * gathered.element_size()
            if self.compute_dtype != self.dtype:
                gathered = gathered.to(self.compute_dtype)
            gathered = gathered.view(group.num_seqs, group.bucket, 2, num_kv_heads, head_dim)
            keys, values = gathered.unbind(2)
            shape = (group.num_seqs, group.query_len, num_kv_heads, heads, head_dim)
            group_query = rows[group.tokens].view(shape)
            in_place = isinstance(group.tokens, slice)
            group_output = output[group.tokens].view(shape) if in_place else output.new_empty(shape)
            for piece in group.pieces:
                mask = self._mask(group, piece, heads, window)
                attended = self._attend_piece(
                    group_query[:, piece.start : piece.stop],
                    keys[:, : piece.bucket],
                    values[:, : piece.bucket],
                    mask,
                    scaling,
                    softcap,
                    sinks,
                )
                group_output[:, piece.start : piece.stop].copy_(attended)
            if not in_place:
                output.index_copy_(0, group.tokens, group_output.flatten(0, 1))
        return output.view(1, self.num_rows, num_heads, head_dim)

    def _attend_piece(
        self,
        query: Tensor,  # [G, T, Hkv, Hq / Hkv, D]
        keys: Tensor,  # [G, L, Hkv, D]
        values: Tensor,
        mask: Tensor,  # [G, 1, R, L]
        scaling: float | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """[G, T, Hkv, Hq / Hkv, D]"""
        num_seqs, tokens, num_kv_heads, heads, head_dim = query.shape
        rows, padded = tokens * heads, mask.shape[2]
        folded = query.permute(0, 2, 1, 3, 4).reshape(num_seqs, num_kv_heads, rows, head_dim)
        if self.compute_dtype != self.dtype:
            folded = folded.to(self.compute_dtype)
        if padded != rows:
            folded = F.pad(folded, (0, 0, 0, padded - rows))
        if softcap is None and sinks is None and self.scheme.kernel == "sdpa":
            attended = attend_sdpa(folded, keys, values, mask, scaling)
        else:
            if sinks is not None:
                # [Hkv, R]: row t * (Hq / Hkv) + h has head h's sink.
                sinks = sinks.float().view(num_kv_heads, 1, heads).expand(-1, tokens, -1).reshape(num_kv_heads, rows)
                sinks = F.pad(sinks, (0, padded - rows))
            attended = attend_chunked(folded, keys, values, mask, scaling, softcap, sinks)
        if padded != rows:
            attended = attended[:, :, :rows]
        return attended.unflatten(2, (tokens, heads)).permute(0, 2, 1, 3, 4)
