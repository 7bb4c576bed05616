"""Finds the blocks that already hold the KV of a prompt's beginning."""

from __future__ import annotations

from collections.abc import Sequence

from specpaged.paging.block_allocator import BlockAllocator, IntegrityError, check_positive
from specpaged.paging.page_table import PageTable


class _Node:
    """A run of S tokens after its parent's run, and the block that holds their KV in the first num_pools pools.

    block == 0: the block is gone, but a continuation of the run is still cached.
    """

    __slots__ = ("after", "block", "children", "num_pools", "parent", "tokens")

    def __init__(self, parent: _Node | None, tokens: tuple[int, ...]):
        self.parent = parent
        self.tokens = tokens
        self.block = 0
        self.after = 0  # the block that stood before it, with whoever has published it
        self.num_pools = 0
        self.children: dict[tuple[int, ...], _Node] = {}


class PrefixCache:
    """A tree of full, committed blocks, each valid in the target's pool, or in the draft's as well.

    The draft's KV may be behind: it is there where somebody has drafted. A block that has the target's alone serves
    everybody, until one with both takes its place.

    A block's key is the path of token runs that leads to it, compared token by token, so no two prefixes can
    be taken for each other. The cache owns no block: the allocator keeps a cached block without an owner in
    its LRU, counts it as free, and tells the cache when it is evicted or about to be overwritten.
    """

    __slots__ = ("_allocator", "_nodes", "_root", "block_size", "looks_ahead")

    def __init__(self, allocator: BlockAllocator, block_size: int, looks_ahead: bool = False):
        check_positive("block_size", block_size)
        if allocator.on_uncache is not None:
            raise ValueError("allocator must not have a prefix cache yet; it can serve one only")
        self._allocator = allocator
        self.block_size = block_size
        # The draft's KV at a position depends on the token behind it, and is never caught up with, as heads' is.
        self.looks_ahead = looks_ahead
        self._root = _Node(None, ())
        self._nodes: dict[int, _Node] = {}  # by block
        allocator.on_uncache = self._forget

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found, owned or not."""
        return len(self._nodes)

    def match(self, token_ids: Sequence[int], max_tokens: int, num_pools: int = 1) -> tuple[list[int], list[int]]:
        """The longest chain of cached full blocks that hold the beginning of token_ids[:max_tokens] for the target, and
        how many of its tokens are valid in each of num_pools pools.

        Where the draft `looks_ahead`, the chain is valid in all of the pools, and its last block left out, behind which
        another token may have stood:

            cached, S = 4    a b c d | e f g h        then x
            asked for        a b c d | e f g h | y    abcd alone: the draft's KV of h is of (h, x)

        The caller becomes one more owner of each, to be passed to PageTable.adopt or freed, last block first.
        """
        if max_tokens < 0:
            raise ValueError(f"max_tokens must be >= 0, got {max_tokens}")
        size, node, blocks = self.block_size, self._root, []
        context_lens = [0] * num_pools
        for start in range(0, min(len(token_ids), max_tokens) - size + 1, size):
            node = node.children.get(tuple(token_ids[start : start + size]))
            if node is None or node.block == 0:
                break
            if self.looks_ahead and num_pools > 1 and not self._continues(node, blocks, num_pools):
                break
            blocks.append(node.block)
            for pool in range(min(num_pools, node.num_pools)):
                if context_lens[pool] == start:
                    context_lens[pool] = start + size
        if self.looks_ahead and num_pools > 1 and blocks:
            blocks.pop()
            context_lens = [len(blocks) * size] * num_pools
        for block in blocks:
            self._allocator.claim_cached(block)
        return blocks, context_lens

    def publish(self, table: PageTable, token_ids: Sequence[int]) -> int:
        """Make the table's full blocks findable, as far as they are committed and valid in the target's pool.

        token_ids are the sequence's committed tokens, without drafts. Where an equal prefix is cached already it stays,
        unless the table has it in more pools. Returns how many blocks were added, or are valid in one more pool. O(1)
        when none has become full since the last call.
        """
        size = self.block_size
        if table.block_size != size:
            raise ValueError(f"table must have the cache's block size, {size}, got {table.block_size}")
        num_tokens, num_new = len(token_ids), 0
        for pool, context_len in zip(range(table.num_shared_pools), table.context_lens, strict=False):
            num_tokens = min(num_tokens, context_len)  # valid in this pool and those before
            if num_tokens // size > table.num_published[pool]:
                num_new += self._publish(table, token_ids, pool, num_tokens // size)
        return num_new

    def _publish(self, table: PageTable, token_ids: Sequence[int], pool: int, num_full: int) -> int:
        """The table's first num_full blocks, valid in `pool` and those before; how many were added, or gained it."""
        size, num_pools = self.block_size, pool + 1
        start, node = table.num_published[pool], table.published_tails[pool]
        if not isinstance(node, _Node) or node.block == 0:
            # Nothing published yet, or the tail was another sequence's equal block, evicted since.
            start, node = 0, self._root
            for later in range(pool + 1, len(table.num_published)):  # whose nodes may be made anew, without them
                table.num_published[later], table.published_tails[later] = 0, None
        num_new = 0
        for i in range(start, num_full):
            tokens = tuple(token_ids[i * size : (i + 1) * size])
            child = node.children.get(tokens) or _Node(node, tokens)
            if child.block == 0 or child.num_pools < num_pools:
                block, replaced = table.blocks[i], child.block
                if block != replaced:
                    self._allocator.mark_cached(block)  # which may refuse it: nothing has changed yet
                child.block, child.num_pools = block, num_pools
                child.after = table.blocks[i - 1] if i else 0
                self._nodes[block] = node.children[tokens] = child
                if replaced not in (0, block):
                    self._allocator.uncache(replaced)
                num_new += 1
            node = child
        table.num_published[pool], table.published_tails[pool] = num_full, node
        return num_new

    @staticmethod
    def _continues(node: _Node, blocks: Sequence[int], num_pools: int) -> bool:
        """Whether the node's block is valid in so many pools, and that before it is of a sequence that went on so."""
        return node.num_pools >= num_pools and node.after == (blocks[-1] if blocks else 0)

    def check_integrity(self) -> None:
        """IntegrityError unless tree, block index and allocator agree on what is cached."""
        num_blocks = 0
        pending = [self._root]
        while pending:
            node = pending.pop()
            for tokens, child in node.children.items():
                if child.parent is not node or child.tokens != tokens or len(tokens) != self.block_size:
                    raise IntegrityError(f"the run {tokens} hangs in the wrong place of the tree")
                if child.block == 0 and not child.children:
                    raise IntegrityError(f"the run {tokens} has neither a block nor a continuation")
                if child.block:
                    num_blocks += 1
                    if child.num_pools < 1:
                        raise IntegrityError(f"block {child.block} can be found, but holds no pool's KV")
                    if self._nodes.get(child.block) is not child:
                        raise IntegrityError(f"block {child.block} stands in the tree where it is not known to be")
                    if not self._allocator.is_cached(child.block):
                        raise IntegrityError(f"block {child.block} can be found, but is not kept")
                pending.append(child)
        num_kept = sum(self._allocator.is_cached(block) for block in range(1, self._allocator.num_blocks + 1))
        if not num_blocks == len(self._nodes) == num_kept:
            raise IntegrityError(
                f"{num_blocks} blocks are in the tree, {len(self._nodes)} in the index, {num_kept} are kept"
            )

    def _forget(self, block: int) -> None:
        node = self._nodes.pop(block)
        if node.block != block:
            return  # another one has taken its place
        node.block = 0
        while node.block == 0 and not node.children and node.parent is not None:
            parent, node.parent = node.parent, None
            del parent.children[node.tokens]
            node = parent
