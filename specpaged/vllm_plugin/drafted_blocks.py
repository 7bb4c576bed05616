"""Which of vLLM's blocks hold the draft's KV, too. Ints only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specpaged.paging.block_allocator import IntegrityError
from specpaged.paging.page_table import DRAFT, TARGET, PageTable


class DraftedBlocks:
    """Blocks whose every token has the draft's KV.

    vLLM shares blocks by their tokens: all that it gives as computed have the target's KV, and the draft's where
    somebody has drafted. It does so when it hands them out, so that B may be given what A fills in the same step:

        A  blocks 4 5 6    |....|....|....|    runs 12 tokens
        B  blocks 4 5 7    |xxxx|xxxx|....|    runs the 3 behind these 8

    A draft model runs in B's place what it lacks. Heads cannot, as they have no hidden states of it; but where the
    drafter `follows` the target, it runs behind the step all that the target has run, A's rows and B's in one pass that
    writes its KV before it reads any. So these 8 tokens are taken to have its KV for B, until the step is over, and
    `note` sees whether they came to have it: where the proposal has failed, they have not.
    """

    def __init__(self, block_size: int, follows: bool):
        self.block_size = block_size
        self.follows = follows
        self._blocks: set[int] = set()
        self._filling: set[int] = set()  # in this step, by sequences whose drafter lacks nothing
        self._trusted: dict[PageTable, int] = {}  # blocks at the beginning of who was given some of these

    def begin(self) -> None:
        """A step begins."""
        self._filling.clear()
        self._trusted.clear()

    def hand_out(self, blocks: Iterable[int]) -> None:
        """These are to be filled anew. To be called for all of a step before any of it is found."""
        self._blocks.difference_update(blocks)

    def run(self, table: PageTable, num_new_tokens: int, begins_anew: bool) -> None:
        """The step runs so many known tokens of a table, which has as much of the draft's KV as its blocks have if it
        `begins_anew`. Tables come in the order in which vLLM has scheduled them.
        """
        size, context_len = self.block_size, table.context_lens[TARGET]
        if begins_anew:
            num_found = self._find(table, context_len // size)
            table.settle((context_len, size * num_found))
            # Behind what is missing the draft runs all anew, and may put what it glances at there before.
            self._blocks.difference_update(table.blocks[num_found:])
        if self.follows and table.context_lens[DRAFT] >= context_len:
            self._filling.update(table.blocks[context_len // size : (context_len + num_new_tokens) // size])

    def _find(self, table: PageTable, num_computed: int) -> int:
        """How many of its first blocks hold the draft's KV, or will behind this step."""
        num_found = num_there = 0
        for num_found, block in enumerate(table.blocks[:num_computed], 1):
            if block in self._blocks:
                num_there += 1
            elif block not in self._filling:
                num_found -= 1
                break
        if num_there < num_found:
            self._trusted[table] = num_found
        return num_found

    def note(self, tables: Sequence[PageTable]) -> None:
        """The step is over: remember the tables' blocks that the drafter has filled with committed tokens.

        They come in the same order as before. One that was given what has not come has no KV from there on.
        """
        for table in tables:
            num_trusted = self._trusted.pop(table, 0) if self._trusted else 0
            if num_trusted and not self._blocks.issuperset(table.blocks[:num_trusted]):
                num_there = next(i for i, block in enumerate(table.blocks) if block not in self._blocks)
                table.settle((table.context_lens[TARGET], num_there * self.block_size))
            num_full = min(table.context_lens) // self.block_size
            if num_full != table.num_published[DRAFT]:
                self._blocks.update(table.blocks[table.num_published[DRAFT] : num_full])
                table.num_published[DRAFT] = num_full

    def check_integrity(self, num_blocks: int) -> None:
        """IntegrityError where a block is none of 1 .. num_blocks."""
        if not all(0 < block <= num_blocks for block in self._blocks):
            raise IntegrityError(f"blocks {sorted(self._blocks)} have a draft's KV; there are {num_blocks}")
