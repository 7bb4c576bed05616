"""Which sequence is in which row of the device's state, and what the host knows of it. No torch."""

from __future__ import annotations

import heapq
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specpaged.paging.page_table import DRAFT

if TYPE_CHECKING:
    from specpaged.engine.sequence import Sequence
    from specpaged.modeling.device_state import DeviceState, RowState


@dataclass
class Member:
    """A sequence of the batch."""

    sequence: Sequence
    row: int
    state: RowState  # as the device has it behind the last round that was read


class DeviceBatch:
    """Keeps the device's rows as the host's sequences are, by what has changed of them."""

    def __init__(self, state: DeviceState):
        self.state = state
        self.members: dict[Sequence, Member] = {}
        self._free = list(range(state.num_rows))  # a heap: low rows come first, so that buckets are small

    @property
    def num_rows(self) -> int:
        """Rows up to the last one that is somebody's."""
        return 1 + max((member.row for member in self.members.values()), default=-1)

    def sync(self, sequences: SequenceOf[Sequence], states: SequenceOf[RowState]) -> list[Member]:
        """Let exactly these sequences be in the batch, in these states; their blocks are those of their page tables.

        Nothing reaches the device before the state is flushed. A round that has been launched and not read may be
        ahead of the host in tokens and lengths: these are changed only where the host has decoded tokens of its own,
        which it does when no round is in flight.
        """
        gone = self.members.keys() - set(sequences)
        for sequence in gone:
            self.remove(sequence)
        self._close_up(len(sequences))
        members = []
        for sequence, state in zip(sequences, states, strict=True):
            member, blocks = self.members.get(sequence), sequence.page_table.blocks
            if member is None:
                member = Member(sequence, heapq.heappop(self._free), replace(state, blocks=list(blocks)))
                self.members[sequence] = member
                self.state.put(member.row, member.state, sequence.token_ids)
            elif member.state != state or member.state.blocks != blocks:
                now = replace(state, blocks=list(blocks))
                self.state.update(member.row, member.state, now, sequence.token_ids)
                member.state = now
            members.append(member)
        return members

    def _close_up(self, num_seqs: int) -> None:
        """Let the last rows be the first that are free, where rounds of so many sequences then have fewer rows."""
        if self.state.bucket(self.num_rows) <= self.state.bucket(num_seqs):
            return
        for member in sorted(self.members.values(), key=lambda member: member.row, reverse=True):
            if member.row < len(self.members):
                break
            row = heapq.heapreplace(self._free, member.row)
            self.state.move(member.row, row)
            member.row = row

    def advance(self, member: Member, num_tokens: int, draft_context_len: int) -> None:
        """A round that was read has left the row with so many tokens, and so much KV of the draft."""
        member.state.num_tokens, member.state.draft_context_len = num_tokens, draft_context_len

    def remove(self, sequence: Sequence) -> None:
        """The sequence has ended, or runs no more, or not here; nothing happens if it was not in the batch."""
        member = self.members.pop(sequence, None)
        if member is not None:
            self.state.clear(member.row)
            heapq.heappush(self._free, member.row)

    def clear(self) -> None:
        """Nobody is in the batch."""
        for sequence in list(self.members):
            self.remove(sequence)

    def check_integrity(self, is_ahead: bool) -> None:
        """IntegrityError where the device has anything else than what the host knows; waits for it."""
        self.state.flush()
        rows = {member.row: (member.state, member.sequence.token_ids) for member in self.members.values()}
        self.state.check_integrity(rows, is_ahead)


def draft_context_len(sequence: Sequence) -> int:
    """Tokens with KV in the draft's pool; 0 where there is none."""
    context_lens = sequence.page_table.context_lens
    return context_lens[DRAFT] if len(context_lens) > DRAFT else 0
