"""Slots for drafts: those that verified tokens leave free, and no others."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf

from specpaged.drafting.draft import NO_DRAFT
from specpaged.engine.sequence import Sequence
from specpaged.paging.block_allocator import BlockAllocator, OutOfBlocksError
from specpaged.paging.page_table import DRAFT
from specpaged.speculative_config import SpeculativeConfig


class DraftSlots:
    """The part of a scheduler that lends slots to drafts, and takes them back.

    When a running sequence's known token finds no block, all drafts give back theirs at once, and the pool is *short*:
    until it has a block again for each running sequence, and those of its drafts, no draft gets a block of its own, but
    what a sequence's last block still holds. Drafts that are given back before they are verified were made for nothing,
    and in a pool that is short they would be, step by step. Whoever is admitted takes blocks of the youngest drafts.

    A draft model whose pool is smaller than the target's has KV for those who ask first. Who finds none, or cannot go
    on, drafts no more.
    """

    allocator: BlockAllocator
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    speculative_config: SpeculativeConfig | None
    waiting: deque[Sequence]
    running: list[Sequence]

    def __init__(self) -> None:
        self.is_short = False
        self.num_short_steps = 0  # that were scheduled so
        self.num_released_drafts = 0  # tokens that were given back before they were verified
        self.num_without_draft_kv = 0  # sequences that draft no more, as the draft's pool has no room for them
        self._num_new_tokens: dict[Sequence, int] = {}  # of the step that is being made

    def reserve_drafts(self, sequences: SequenceOf[Sequence], wanted: SequenceOf[int] | None = None) -> list[int]:
        """How many draft tokens to make for sequences that have just been committed, with slots for them reserved.

        No more than are `wanted`, or the configuration says, than could be emitted, than the next step's token budget
        has room for beside a token of everybody, and than free blocks hold.
        """
        counts = []
        shares, budget = self._draft_shares(sequences, wanted)
        for sequence, share in zip(sequences, shares, strict=True):
            k = min(share, self._num_useful_draft_tokens(sequence), budget)
            counts.append(self._reserve_draft(sequence, self._with_draft_kv(sequence, k)) if k > 0 else 0)
            budget -= counts[-1]
        return counts

    def reserve_rounds(
        self, sequences: SequenceOf[Sequence], num_rounds: int, wanted: SequenceOf[int] | None = None
    ) -> list[tuple[int, int]]:
        """As `ReserveRounds` says."""
        reserved = []
        shares, budget = self._draft_shares(sequences, wanted)
        for sequence, share in zip(sequences, shares, strict=True):
            k = min(share, budget)
            num_certain = len(sequence.draft.token_ids) + num_rounds - 1  # a token of each round, and what waits
            most = min(num_certain + (num_rounds - 1) * k, self._num_useful_draft_tokens(sequence))
            if k > 0 and most > 0:
                num_held = self._with_draft_kv(sequence, most)
                k = min(k, num_held)
                most = num_held if k else min(most, num_certain)
            budget -= k
            reserved.append((k, 1 + (self._reserve_draft(sequence, most, num_certain) if most > 0 else 0)))
        return reserved

    def _draft_shares(self, sequences: SequenceOf[Sequence], wanted: SequenceOf[int] | None) -> tuple[list[int], int]:
        """How many drafts each sequence may have, and how many all of them may."""
        if self.is_short:
            self.is_short = not self._has_blocks_for_drafts()
        num_going_on = len(self.waiting) + sum([not sequence.has_ended for sequence in self.running])
        batch_size = min(self.max_num_seqs, num_going_on)
        if wanted is None:
            configured = self.speculative_config.num_draft_tokens(batch_size) if self.speculative_config else 0
            wanted = [configured] * len(sequences)
        shares = [min(k, sequence.max_draft_tokens) for sequence, k in zip(sequences, wanted, strict=True)]
        return shares, self.max_num_batched_tokens - batch_size

    def _has_blocks_for_drafts(self) -> bool:
        """Whether there is a block for a known token of each running sequence, and there are those of its drafts."""
        most = 0 if self.speculative_config is None else self.speculative_config.max_draft_tokens
        return self.allocator.num_free >= len(self.running) * (1 + -(-most // self.block_size))

    def _with_draft_kv(self, sequence: Sequence, num_drafts: int) -> int:
        """For how many of so many drafts there are slots in the draft's pool; who has none drafts no more."""
        table = sequence.page_table
        if len(table.context_lens) <= DRAFT:
            return num_drafts
        num_held = table.reserve_draft(len(sequence.token_ids), num_drafts)
        if num_held is None:
            sequence.max_draft_tokens = 0
            self.num_without_draft_kv += 1
            return 0
        return num_held

    def _reserve_draft(self, sequence: Sequence, k: int, num_certain: int = 0) -> int:
        """Slots for k drafts behind the known tokens, or for as many as the last block still holds.

        In a pool that is short no more than that, but for `num_certain` tokens that are going to come.
        """
        table, num_tokens = sequence.page_table, len(sequence.token_ids)
        if self.is_short:
            k = min(k, max(num_certain, -num_tokens % self.block_size))
        try:
            table.reserve(num_tokens + k)
        except OutOfBlocksError:
            return max(0, min(k, table.capacity - num_tokens))
        return k

    def _release_drafts(self) -> bool:
        """Give back all blocks that are for drafts alone, and be short of blocks; False if nobody has any."""
        self.is_short = True
        holders = [sequence for sequence in self.running if self._num_draft_blocks(sequence)]
        for sequence in holders:
            self._release_draft(sequence)
        return bool(holders)

    def _release_draft(self, sequence: Sequence) -> None:
        """Give back the blocks that a sequence holds for drafts alone, and its draft."""
        table, num_tokens = sequence.page_table, self._num_tokens_without_draft(sequence)
        self.num_released_drafts += len(sequence.draft.token_ids)
        sequence.draft = NO_DRAFT
        for pool, context_len in enumerate(table.context_lens):
            table.truncate(pool, min(context_len, num_tokens))
        table.reserve(num_tokens)  # which truncating may have taken, too

    def _num_draft_blocks(self, sequence: Sequence) -> int:
        """Blocks that a sequence holds for drafts alone: those of its draft, and what that was expected to need."""
        num_needed = -(-self._num_tokens_without_draft(sequence) // self.block_size)
        return max(0, len(sequence.page_table.blocks) - num_needed)

    def _num_tokens_without_draft(self, sequence: Sequence) -> int:
        """Slots that a sequence needs without drafts: one for its last known token only if that runs now."""
        return sequence.num_tokens if sequence in self._num_new_tokens else sequence.page_table.context_lens[0]

    def _num_useful_draft_tokens(self, sequence: Sequence) -> int:
        """Drafts that could still be emitted, one token of the round being the target's own."""
        room, most = self.max_model_len - len(sequence.token_ids), sequence.params.max_tokens
        return min(room, room if most is None else most - len(sequence.output_token_ids)) - 1
