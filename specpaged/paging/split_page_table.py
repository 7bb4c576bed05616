"""A page table whose draft has blocks of its own, in a pool of another size. Ints only."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from specpaged.paging.block_allocator import BlockAllocator, IntegrityError, OutOfBlocksError
from specpaged.paging.page_table import DRAFT, TARGET, PageTable

# Tokens of a text's beginning that stay where a draft reads a window: attention sinks (2309.17453 keeps four as well).
NUM_SINK_TOKENS = 4


class SplitPageTable(PageTable):
    """The target's KV lies in `blocks`, the draft's in those of `draft`, a table of one pool over another allocator.

    A draft decides nothing, so that its KV may be given up at any time, and its pool be as small as one likes. What it
    holds is a function of known tokens, and is computed anew from these by whoever drafts again.

    With a `window` of W tokens the draft reads no more than W of a sequence: its first four (attention sinks), and its
    last ones. It reads them as one text, in the positions 0, 1, 2, ... (the window with re-computation of 2309.17453):
    a token's KV depends on all before it, so nothing of the window is valid any more when it slides. It slides when the
    text is full, to half of W: of two tokens the draft runs one once more. W = 16, `-` is skipped:

                           the sequence                          the draft's text
        30 tokens, full    tttt--------------tttttttttttt        tttt tttttttttttt        num_skipped 14
        one more: slides   tttt-------------------tttttttt       tttt tttttttt            num_skipped 19
        of which is valid                                        tttt                     context_lens[DRAFT] 4 + 19

    `context_lens[DRAFT]` counts in the sequence, as ever: up to there the draft has run what it reads.
    """

    __slots__ = ("_num_skipped", "draft", "window")

    def __init__(
        self,
        allocator: BlockAllocator,
        draft_allocator: BlockAllocator,
        block_size: int,
        window: int | None = None,
    ):
        super().__init__(allocator, block_size, num_pools=2)
        self.draft = PageTable(draft_allocator, block_size)
        self.window = window
        self._num_skipped = 0

    @property
    @override
    def num_shared_pools(self) -> int:
        return 1

    @property
    @override
    def draft_entries(self) -> Sequence[int]:
        return self.draft.entries

    @property
    @override
    def draft_position(self) -> int:
        return self.draft.context_lens[TARGET]

    @property
    @override
    def num_skipped(self) -> int:
        return self._num_skipped

    @override
    def draft_text(self, token_ids: Sequence[int], num_tokens: int) -> Sequence[int]:
        start = self.context_lens[DRAFT]
        if start >= NUM_SINK_TOKENS or not self._num_skipped:
            return token_ids[start:num_tokens]
        return [*token_ids[start:NUM_SINK_TOKENS], *token_ids[NUM_SINK_TOKENS + self._num_skipped : num_tokens]]

    @override
    def draft_lag(self, num_tokens: int) -> int:
        position, num_read = self.draft_position, num_tokens - self._num_skipped
        if self._is_full(num_tokens):
            position, num_read = min(position, NUM_SINK_TOKENS), NUM_SINK_TOKENS + self.window // 2
        return num_read - position

    @override
    def reserve_draft(self, num_tokens: int, num_drafts: int = 0) -> int | None:
        if self.window is not None and self._is_full(num_tokens + min(num_drafts, self.window // 8)):
            self._slide(num_tokens)
        num_read = num_tokens - self._num_skipped
        if self.window is not None:
            num_drafts = max(0, min(num_drafts, self.window - num_read))
        for num_slots in (num_read + num_drafts, num_read):
            try:
                self.draft.reserve(num_slots)
                return min(num_drafts, self.draft.capacity - num_read)
            except OutOfBlocksError:
                continue
        self.drop_draft()
        return None

    @override
    def draft_scratch(self, num_tokens: int, first_token: int) -> Sequence[int]:
        return ()  # the draft's blocks are no more than it reads

    def drop_draft(self) -> int:
        """Give up the draft's KV. Returns how many blocks it had."""
        num_dropped = self.draft.free()
        self.context_lens[DRAFT] = self._num_skipped = 0
        return num_dropped

    @override
    def advance(self, pool: int, num_tokens: int) -> None:
        if pool != DRAFT:
            super().advance(pool, num_tokens)
            return
        self.draft.advance(TARGET, num_tokens)
        self._count()

    @override
    def truncate(self, pool: int, num_tokens: int) -> int:
        draft_context_len = self.context_lens[DRAFT]
        if pool != DRAFT:
            self.context_lens[DRAFT] = 0  # which needs none of these blocks
            try:
                return super().truncate(pool, num_tokens)
            finally:
                self.context_lens[DRAFT] = draft_context_len
        if not 0 <= num_tokens <= draft_context_len:
            raise ValueError(f"num_tokens must be in 0..{draft_context_len}, the draft's context, got {num_tokens}")
        num_freed = self.draft.truncate(TARGET, min(self.draft_position, self._num_read(num_tokens)))
        self._count()
        return num_freed

    @override
    def settle(self, context_lens: Sequence[int], num_slots: int = 0) -> int:
        if len(context_lens) == len(self.context_lens) and self._num_read(context_lens[DRAFT]) > self.draft.capacity:
            raise ValueError(
                f"context_lens[{DRAFT}]={context_lens[DRAFT]} is {self._num_read(context_lens[DRAFT])} tokens of the "
                f"draft's text; allowed: {self.draft.capacity}, the capacity of its blocks"
            )
        num_freed = super().settle((context_lens[TARGET], 0), num_slots)
        num_freed += self.draft.settle((self._num_read(context_lens[DRAFT]),), self._num_read(num_slots))
        self._count()
        return num_freed

    @override
    def fork(self, num_tokens: int) -> tuple[PageTable, list[tuple[int, int]]]:
        """As PageTable does, of the target's KV alone: the child's draft has none, and begins anew."""
        shared, pairs = super().fork(num_tokens)
        child = SplitPageTable(self._allocator, self.draft._allocator, self.block_size, self.window)
        child.blocks, child.context_lens = shared.blocks, [shared.context_lens[TARGET], 0]
        return child, pairs

    @override
    def adopt(self, blocks: Sequence[int], context_lens: Sequence[int]) -> None:
        super().adopt(blocks, [*context_lens[:DRAFT], 0])

    @override
    def free(self) -> int:
        return self.drop_draft() + super().free()

    @override
    def check_integrity(self) -> None:
        super().check_integrity()
        self.draft.check_integrity()
        if self.context_lens[DRAFT] != self._num_reached():
            raise IntegrityError(
                f"the draft holds {self.draft_position} tokens of its text, which skips {self._num_skipped}, and "
                f"{self.context_lens[DRAFT]} are counted"
            )
        if self.window is not None and self.draft_position > self.window:
            raise IntegrityError(f"the draft holds {self.draft_position} tokens; its window has {self.window}")

    def _is_full(self, num_tokens: int) -> bool:
        return self.window is not None and num_tokens - self._num_skipped > self.window

    def _slide(self, num_tokens: int) -> None:
        """From now on the draft reads the first tokens of num_tokens and, behind them, the last ones: half a window."""
        self.draft.truncate(TARGET, min(self.draft_position, NUM_SINK_TOKENS))
        self._num_skipped = num_tokens - NUM_SINK_TOKENS - self.window // 2
        self._count()

    def _num_read(self, num_tokens: int) -> int:
        """Of the first num_tokens tokens those that the draft reads."""
        if not self._num_skipped:
            return num_tokens
        return max(min(num_tokens, NUM_SINK_TOKENS), num_tokens - self._num_skipped)

    def _num_reached(self) -> int:
        """Tokens of the sequence up to which the draft has run what it reads."""
        position = self.draft_position
        return position if position < NUM_SINK_TOKENS else position + self._num_skipped

    def _count(self) -> None:
        self.context_lens[DRAFT] = self._num_reached()
