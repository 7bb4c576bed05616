"""One sequence's list of blocks, with the number of valid tokens in each pool. Rollback is `truncate`.

A page table is what vLLM calls a block table.
"""

from __future__ import annotations

from collections.abc import Sequence

from specpaged.paging.block_allocator import BlockAllocator, IntegrityError, OutOfBlocksError, check_positive

TARGET = 0
DRAFT = 1


class PageTable:
    """Blocks of one sequence, the same ids in every pool, and one context length per pool.

    A pool is one model's KV cache: the target's, the draft's. The token at position i lies in slot
    blocks[i // S] * S + i % S of each. One round of two sequences, S = 4 and K = 4 drafts each; T known
    tokens, the last of which (the bonus) has no KV, so c = T - 1; x: valid in the target, o: in the draft. The
    target runs in the step behind the draft's; both pools keep T + a tokens, or what they hold if that is less:

                                      A: T = 6, a = 1 accepted            B: T = 8, a = 4 accepted
        before                target  |xxxx|x...|                c = 5    |xxxx|xxx.|                c = 7
                              draft   |oooo|o...|                    5    |oooo|ooo.|                    7
        reserve(T + K)                |....|....|....|         10 slots   |....|....|....|         12 slots
        the draft's passes    draft   |oooo|oooo|o...|        T + K - 1   |oooo|oooo|ooo.|               11
        the target's pass     target  |xxxx|xxxx|xx..|            T + K   |xxxx|xxxx|xxxx|               12
        truncate target to T + a      |xxxx|xxx.|....|       7, 0 freed   |xxxx|xxxx|xxxx|       12, 0 freed
        truncate draft to T + a       |oooo|ooo.|            7, 1 freed   |oooo|oooo|ooo.|       11, 0 freed

    Then a fork of A at 6 tokens, A's blocks being [1, 2] and 5 the next one free: the full block is shared,
    the partly filled one is copied.

        A      [1, 2]  |xxxx|xxx.|
        child  [1, 5]  |xxxx|xx..|     to copy in every KV cache: [(2, 5)]
    """

    __slots__ = ("_allocator", "block_size", "blocks", "context_lens", "num_published", "published_tails")

    def __init__(self, allocator: BlockAllocator, block_size: int, num_pools: int = 1):
        check_positive("block_size", block_size)
        check_positive("num_pools", num_pools)
        self._allocator = allocator
        self.block_size = block_size
        self.blocks: list[int] = []
        self.context_lens: list[int] = [0] * num_pools  # per pool: tokens whose KV is valid
        # Per pool: how far the prefix cache's last publish() of this table came. Set by the cache, reset here.
        self.num_published = [0] * num_pools
        self.published_tails: list[object | None] = [None] * num_pools

    @property
    def entries(self) -> Sequence[int]:
        """The numbers by which a pass finds the sequence's KV: here its blocks, in order."""
        return self.blocks

    @property
    def num_shared_pools(self) -> int:
        """Pools whose KV lies in these blocks, so that whoever shares a block shares it with them: here all."""
        return len(self.context_lens)

    # Of a table with a draft's pool. The draft reads the sequence's tokens, all of them, and its KV lies in the same
    # blocks as the target's; SplitPageTable has it otherwise.

    @property
    def draft_entries(self) -> Sequence[int]:
        """The numbers by which a pass of the draft model finds the sequence's KV."""
        return self.entries

    @property
    def draft_position(self) -> int:
        """The place, in the text that the draft reads, of the next token that it is to run."""
        return self.context_lens[DRAFT]

    @property
    def num_skipped(self) -> int:
        """Tokens that are missing in the text that the draft reads, before `draft_position`."""
        return 0

    def draft_text(self, token_ids: Sequence[int], num_tokens: int) -> Sequence[int]:
        """Of the sequence's first num_tokens tokens those that the draft is to run, from `draft_position` on."""
        return token_ids[self.context_lens[DRAFT] : num_tokens]

    def draft_lag(self, num_tokens: int) -> int:
        """How many tokens the draft has to run before it has run all that it reads of num_tokens tokens."""
        return num_tokens - self.context_lens[DRAFT]

    def reserve_draft(self, num_tokens: int, num_drafts: int = 0) -> int | None:
        """Slots in the draft's pool for num_tokens known tokens and drafts behind them: for how many drafts.

        None where not even the known ones have slots, and the draft has given up its KV. Here they have the target's,
        which are reserved already.
        """
        return num_drafts

    def draft_scratch(self, num_tokens: int, first_token: int) -> Sequence[int]:
        """Blocks with room for num_tokens tokens in the draft's pool that holds nothing there, the last ones that the
        target's tokens lie in; nothing where there are none.

        They are behind `first_token`, from which on the blocks are no cached ones that the table has adopted, and
        nobody else's: whoever shares a block may be about to write there. S = 4, 6 tokens, first_token 3:

            target  |xxxx|xxxx|xxxx|xx..|
            draft   |oo..|....|ssss|ss..|      the last two blocks
        """
        size, blocks = self.block_size, self.blocks
        end = -(-self.context_lens[TARGET] // size)
        start = end - -(-num_tokens // size)
        if start < -(-max(first_token, self.context_lens[DRAFT]) // size):
            return ()
        scratch = blocks[start:end]
        return scratch if all(self._allocator.ref_count(block) == 1 for block in scratch) else ()

    @property
    def capacity(self) -> int:
        """The number of tokens that the blocks have room for."""
        return len(self.blocks) * self.block_size

    def reserve(self, num_tokens: int) -> None:
        """Capacity for num_tokens tokens in all. All or nothing: an error leaves everything as it was.

        The caller will write the target's slots from its context length to num_tokens - 1: ValueError if one of them
        lies in a block with more than one owner; a cached block among theirs stops being cached. OutOfBlocksError.
        """
        if num_tokens < 0:
            raise ValueError(f"num_tokens must be >= 0, got {num_tokens}")
        blocks, allocator = self.blocks, self._allocator
        num_needed = -(-num_tokens // self.block_size)
        num_new = num_needed - len(blocks)
        valid = self.context_lens[TARGET]
        written = blocks[valid // self.block_size : num_needed] if num_tokens > valid else ()
        stale = allocator.check_writable(written)
        if num_new > 0 and num_new > allocator.num_free:
            raise OutOfBlocksError(
                f"{num_tokens} tokens need {num_new} more blocks, but only {allocator.num_free} "
                f"of {allocator.num_blocks} are free"
            )
        for block in stale:
            allocator.uncache(block)
        for _ in range(num_new):
            blocks.append(allocator.allocate())

    def advance(self, pool: int, num_tokens: int) -> None:
        """num_tokens more tokens have valid KV in `pool`.

        A pool may be behind the target's in blocks that others own, too: known tokens have the same KV whoever computes
        it. ValueError past the capacity, or when a token from the target's context length on lies in such a block.
        """
        self._check_pool(pool)
        context_len = self.context_lens[pool]
        new_len = context_len + num_tokens
        size = self.block_size
        if num_tokens < 0 or new_len > len(self.blocks) * size:
            room = self.capacity - context_len
            raise ValueError(f"num_tokens must be in 0..{room}, the capacity left, got {num_tokens}")
        first = max(context_len, self.context_lens[TARGET])
        written = self.blocks[first // size : -(-new_len // size)] if new_len > first else ()
        for block in self._allocator.check_writable(written):
            self._allocator.uncache(block)
        self.context_lens[pool] = new_len

    def truncate(self, pool: int, num_tokens: int) -> int:
        """The only rollback: `pool` keeps its first num_tokens tokens. O(blocks dropped); moves no KV.

        Blocks that no pool needs any more are freed, reserved but unused ones too. Returns how many.
        """
        context_lens = self.context_lens
        if not 0 <= pool < len(context_lens):
            self._check_pool(pool)
        if not 0 <= num_tokens <= context_lens[pool]:
            raise ValueError(
                f"num_tokens must be in 0..{context_lens[pool]}, the context of pool {pool}, got {num_tokens}"
            )
        context_lens[pool] = num_tokens
        if num_tokens < self.num_published[pool] * self.block_size:
            self.num_published[pool], self.published_tails[pool] = 0, None
        num_kept = -(-(max(context_lens) if len(context_lens) > 1 else num_tokens) // self.block_size)
        return self._drop(num_kept) if num_kept < len(self.blocks) else 0

    def settle(self, context_lens: Sequence[int], num_slots: int = 0) -> int:
        """From now on each pool has valid KV of so many tokens: `advance` or `truncate` of all of them at once.

        Blocks that neither a pool nor num_slots tokens need are freed. Returns how many. ValueError as of the two.
        """
        before, blocks, size = self.context_lens, self.blocks, self.block_size
        longest, valid = max(context_lens), before[TARGET]
        if len(context_lens) != len(before) or min(context_lens) < 0 or longest > len(blocks) * size:
            raise ValueError(
                f"context_lens must be {len(before)} in 0..{self.capacity}, the capacity, got {list(context_lens)}"
            )
        num_kept = -(-longest // size)
        if longest > valid:
            for block in self._allocator.check_writable(blocks[valid // size : num_kept]):
                self._allocator.uncache(block)
        for pool, context_len in enumerate(context_lens):
            if context_len < self.num_published[pool] * size:
                self.num_published[pool], self.published_tails[pool] = 0, None
        before[:] = context_lens
        if num_slots > longest:
            num_kept = -(-num_slots // size)
        return self._drop(num_kept) if num_kept < len(blocks) else 0

    def fork(self, num_tokens: int) -> tuple[PageTable, list[tuple[int, int]]]:
        """A child with the first num_tokens tokens, as far as each pool of this one has them, and the blocks to copy.

        Full blocks are shared. A partly filled last block gets a copy: (source, destination), to be made in
        every KV cache before either sequence writes. OutOfBlocksError leaves everything as it was.
        """
        valid = self.context_lens[TARGET]
        if not 0 <= num_tokens <= valid:
            raise ValueError(f"num_tokens must be in 0..{valid}, the target's context, got {num_tokens}")
        child = PageTable(self._allocator, self.block_size, len(self.context_lens))
        num_full, remainder = divmod(num_tokens, self.block_size)
        pairs = [(self.blocks[num_full], self._allocator.allocate())] if remainder else []
        for block in self.blocks[:num_full]:
            self._allocator.share(block)
        child.blocks = self.blocks[:num_full] + [destination for _, destination in pairs]
        child.context_lens = [min(num_tokens, context_len) for context_len in self.context_lens]
        return child, pairs

    def adopt(self, blocks: Sequence[int], context_lens: Sequence[int]) -> None:
        """Take over full blocks that already count this table as an owner, valid as far as PrefixCache.match says.

        The table must be empty, and the target's pool valid in all of them: context_lens[TARGET] == len(blocks) * S.
        """
        if self.blocks:
            raise ValueError(f"only an empty page table can adopt blocks; this one has {len(self.blocks)}")
        num_tokens = len(blocks) * self.block_size
        if (
            len(context_lens) != len(self.context_lens)
            or context_lens[TARGET] != num_tokens
            or not all(0 <= context_len <= num_tokens for context_len in context_lens)
        ):
            raise ValueError(
                f"context_lens must be {len(self.context_lens)} of at most {num_tokens} ({len(blocks)} full blocks of "
                f"{self.block_size}), the target's that, got {list(context_lens)}"
            )
        for block in blocks:
            if self._allocator.ref_count(block) == 0:
                raise ValueError(f"blocks must each have an owner; block {block} has none")
        self.blocks = list(blocks)
        self.context_lens = list(context_lens)

    def free(self) -> int:
        """Give every block back; the table is empty and usable again. Returns how many it had."""
        num_pools = len(self.context_lens)
        self.context_lens, self.num_published, self.published_tails = (
            [0] * num_pools,
            [0] * num_pools,
            [None] * num_pools,
        )
        return self._drop(0)

    def check_integrity(self) -> None:
        """IntegrityError unless the blocks are distinct and owned, and hold what is valid and published."""
        if len(set(self.blocks)) != len(self.blocks):
            raise IntegrityError(f"the page table names a block twice: {self.blocks}")
        for block in self.blocks:
            if not 0 < block <= self._allocator.num_blocks:
                raise IntegrityError(f"the page table names block {block}, which does not exist")
            if self._allocator.ref_count(block) == 0:
                raise IntegrityError(f"the page table names block {block}, which has no owner")
        for pool, context_len in enumerate(self.context_lens):
            if context_len < 0 or (pool < self.num_shared_pools and context_len > self.capacity):
                raise IntegrityError(f"pool {pool} has {context_len} valid tokens, capacity {self.capacity}")
            if self.num_published[pool] * self.block_size > context_len:
                raise IntegrityError(
                    f"pool {pool} has {self.num_published[pool]} blocks published, but {context_len} valid tokens"
                )

    def _drop(self, num_kept: int) -> int:
        blocks, free = self.blocks, self._allocator.free
        num_dropped = len(blocks) - num_kept
        # Last block first: in the LRU of cached blocks a continuation is then older than what it continues.
        for _ in range(num_dropped):
            free(blocks.pop())
        return num_dropped

    def _check_pool(self, pool: int) -> None:
        if not 0 <= pool < len(self.context_lens):
            raise ValueError(f"pool must be in 0..{len(self.context_lens) - 1}, got {pool!r}")
