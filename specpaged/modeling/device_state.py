"""The running batch as the device has it: what a round reads and writes, without asking the host.

One buffer of int32 holds a row of every field for each sequence that may run. A row is nobody's, and then its limit is
0, so that no round runs it; or it is a sequence's, from when it is put there until it is cleared. What the host changes
(who runs, a new block, a token that it has decoded itself) is gathered, and goes up in one copy:

    put, move, clear, ...      note places in the buffer and what is to be there     no device is involved
    flush                      one upload of all of that, and one scatter            nothing, where nothing changed
                               (where rows move, first a gather and a scatter of each field)

A round changes tokens behind the known ones, the lengths, and the limit of a row that has failed. All of that follows
from what comes back of it, so that the host's own record stays right, one round late.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from specpaged.modeling.copies import Copies
from specpaged.modeling.ragged_batch import ints
from specpaged.paging.block_allocator import IntegrityError
from specpaged_kernels.decoding_round import Rows

_ALIGNMENT = 4  # ints: 16 bytes


@dataclass
class RowState:
    """What the host knows of a row: as of the last round that it has read."""

    num_tokens: int  # known ones
    draft_context_len: int
    limit: int  # tokens that there may be in all
    max_drafts: int  # of a round
    has_draft: bool  # whether the draft keeps KV of the sequence
    num_prompt_tokens: int
    seed: int  # of 64 bits
    temperature: float  # 0: greedy
    end_id: int = 0  # the token that stands where there is none, of rounds that make one up
    blocks: list[int] = field(default_factory=list, compare=False)

    def ints(self) -> dict[str, int]:
        """The fields that are one int of the row."""
        temperature = struct.unpack("i", struct.pack("f", self.temperature or 1.0))[0]
        return {
            "num_tokens": self.num_tokens,
            "draft_context_lens": self.draft_context_len,
            "limits": self.limit,
            "max_drafts": self.max_drafts,
            "has_draft": int(self.has_draft),
            "num_prompt_tokens": self.num_prompt_tokens,
            "draws": int(self.temperature > 0),
            "temperatures": temperature,
            "end_ids": self.end_id,
        }


def state_bytes(num_rows: int, max_model_len: int, block_size: int) -> int:
    """Of a DeviceState of so many sequences."""
    return DeviceState(num_rows, max_model_len, block_size, torch.device("meta"), Copies()).num_bytes


class DeviceState:
    """The buffers of up to `num_rows` sequences of up to `max_model_len` tokens."""

    def __init__(self, num_rows: int, max_model_len: int, block_size: int, device: torch.device, copies: Copies):
        self.num_rows = num_rows
        self._copies = copies
        width = -(-max_model_len // block_size)
        one = dict.fromkeys(RowState(0, 0, 0, 0, False, 0, 0, 0.0).ints(), ())
        shapes = one | {"seeds": (2,), "page_table": (width,), "token_ids": (max_model_len,)}
        starts, end = {}, 0
        for name, shape in shapes.items():
            starts[name] = end
            end += -(-num_rows * (shape[0] if shape else 1) // _ALIGNMENT) * _ALIGNMENT
        self._values = torch.zeros(end, dtype=torch.int32, device=device)
        self._starts = starts
        self._strides = {name: shape[0] if shape else 1 for name, shape in shapes.items()}
        views = {
            name: self._values[start : start + num_rows * self._strides[name]].view(num_rows, *shapes[name])
            for name, start in starts.items()
        }
        self.fields: dict[str, Tensor] = views  # each [num_rows, ...] int32
        self._changes: dict[int, int] = {}  # by place in the buffer
        self._moves: dict[int, int] = {}  # rows that are taken over, before anything changes, as others are

    def rows(self, num_seqs: int) -> Rows:
        """The first rows, for the kernels of a round."""
        names = ("token_ids", "num_tokens", "draft_context_lens", "limits", "max_drafts", "has_draft")
        return Rows(*(self.fields[name][:num_seqs] for name in names))

    def bucket(self, num_seqs: int) -> int:
        """Rows of a round of so many sequences: a power of two, or all that there are."""
        return min(1 << max(0, num_seqs - 1).bit_length(), self.num_rows)

    def temperatures(self, num_seqs: int) -> Tensor:
        """[num_seqs] float32 of the first rows: 1 of those that are greedy."""
        return self.fields["temperatures"][:num_seqs].view(torch.float32)

    @property
    def num_bytes(self) -> int:
        """What it takes of the device's memory."""
        return self._values.nbytes

    @property
    def num_changes(self) -> int:
        """Numbers that the next `flush` takes to the device."""
        return len(self._changes)

    def put(self, row: int, state: RowState, token_ids: Sequence[int]) -> None:
        """A sequence with so many known tokens is in this row from now on."""
        for name, value in state.ints().items():
            self._note(name, row, (value,))
        self._note("seeds", row, (_int32(state.seed), _int32(state.seed >> 32)))
        self._note("page_table", row, state.blocks)
        self._note("token_ids", row, token_ids)

    def update(self, row: int, before: RowState, now: RowState, token_ids: Sequence[int]) -> None:
        """What has changed of a row, which has all of these tokens and had the first of them."""
        old = before.ints()
        for name, value in now.ints().items():
            if value != old[name]:
                self._note(name, row, (value,))
        if now.num_tokens > before.num_tokens:
            self._note("token_ids", row, token_ids[before.num_tokens : now.num_tokens], before.num_tokens)
        if now.blocks != before.blocks:
            same = 0
            for block, other in zip(now.blocks, before.blocks, strict=False):
                if block != other:
                    break
                same += 1
            self._note("page_table", row, now.blocks[same:], same)

    def move(self, row: int, to: int) -> None:
        """The sequence of this row is in another one from now on, which is nobody's, with all that it has by then: a
        round in flight may be ahead of what the host knows of it."""
        for name, stride in self._strides.items():
            start, end = (self._starts[name] + of * stride for of in (row, to))
            for place in self._noted(end, stride):
                del self._changes[place]
            for place in self._noted(start, stride):
                self._changes[place - start + end] = self._changes.pop(place)
        self._moves[to] = self._moves.pop(row, row)
        self.clear(row)

    def clear(self, row: int) -> None:
        """The row is nobody's."""
        for name in ("num_tokens", "draft_context_lens", "limits", "max_drafts", "has_draft", "draws"):
            self._note(name, row, (0,))

    def flush(self) -> None:
        """Bring all changes to the device: in one copy, if there are any."""
        if not self._changes:
            return
        parts = self._moves, self._moves.values(), self._changes, self._changes.values()
        sizes = [len(part) for part in parts]
        targets, sources, places, values = self._copies.upload(ints([*chain(*parts)])).split(sizes)
        for field_values in self.fields.values() if self._moves else ():
            field_values.index_copy_(0, targets, field_values.index_select(0, sources))
        self._values.index_copy_(0, places, values.int())
        self._moves.clear()
        self._changes.clear()

    def check_integrity(self, rows: Mapping[int, tuple[RowState, Sequence[int]]], is_ahead: bool) -> None:
        """IntegrityError unless the device has what the host knows of each row, and nobody's rows do not run.

        `is_ahead`: a round has been launched that the host has not read, so that there may be more tokens than it
        knows. Waits for the device.
        """
        fields = {name: values.cpu() for name, values in self.fields.items()}
        for row in range(self.num_rows):
            if row not in rows:
                if fields["limits"][row] or fields["has_draft"][row]:
                    raise IntegrityError(f"row {row} is nobody's, and would run")
                continue
            state, token_ids = rows[row]
            for name, value in state.ints().items():
                found = int(fields[name][row])
                moves = is_ahead and name in ("num_tokens", "draft_context_lens", "limits")
                if found != value and not moves:
                    raise IntegrityError(f"row {row} has {name}={found} on the device, and {value} on the host")
            if is_ahead and int(fields["num_tokens"][row]) < state.num_tokens:
                raise IntegrityError(f"row {row} has fewer tokens on the device than on the host")
            self._check(row, fields["token_ids"], list(token_ids[: state.num_tokens]), "tokens")
            self._check(row, fields["page_table"], state.blocks, "blocks")
            self._check(row, fields["seeds"], [_int32(state.seed), _int32(state.seed >> 32)], "seed")

    @staticmethod
    def _check(row: int, found: Tensor, expected: Sequence[int], what: str) -> None:
        if found[row, : len(expected)].tolist() != list(expected):
            raise IntegrityError(f"row {row} has other {what} on the device than on the host: {list(expected)}")

    def _noted(self, start: int, count: int) -> list[int]:
        """Of so many places those that change."""
        if count < len(self._changes):
            return [place for place in range(start, start + count) if place in self._changes]
        return [place for place in self._changes if start <= place < start + count]

    def _note(self, name: str, row: int, values: Iterable[int], offset: int = 0) -> None:
        place = self._starts[name] + row * self._strides[name] + offset
        self._changes.update(enumerate(values, place))


def _int32(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - 2**32 if value >= 2**31 else value
