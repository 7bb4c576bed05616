"""Finds the blocks that already hold the KV of a prompt's beginning."""

from __future__ import annotations

from collections.abc import Sequence

from specpaged.paging.block_allocator import BlockAllocator, IntegrityError, check_positive
from specpaged.paging.page_table import PageTable


class _Node:
    """A run of S tokens after its parent's run, and the block that holds their KV in the first num_pools pools.

    block == 0: the block is gone, but a continuation of the run is still cached.
    """

    __slots__ = ("block", "children", "num_pools", "parent", "tokens")

    def __init__(self, parent: _Node | None, tokens: tuple[int, ...]):
        self.parent = parent
        self.tokens = tokens
        self.block = 0
        self.num_pools = 0
        self.children: dict[tuple[int, ...], _Node] = {}


class PrefixCache:
    """A tree of full, committed blocks, each valid in the target's pool, or in every pool.

    Sequences that never draft have page tables of one pool. Their blocks serve their like, until a sequence with more
    pools has computed the same tokens: then its block takes the place.

    A block's key is the path of token runs that leads to it, compared token by token, so no two prefixes can
    be taken for each other. The cache owns no block: the allocator keeps a cached block without an owner in
    its LRU, counts it as free, and tells the cache when it is evicted or about to be overwritten.
    """

    __slots__ = ("_allocator", "_nodes", "_root", "block_size")

    def __init__(self, allocator: BlockAllocator, block_size: int):
        check_positive("block_size", block_size)
        if allocator.on_uncache is not None:
            raise ValueError("allocator must not have a prefix cache yet; it can serve one only")
        self._allocator = allocator
        self.block_size = block_size
        self._root = _Node(None, ())
        self._nodes: dict[int, _Node] = {}  # by block
        allocator.on_uncache = self._forget

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found, owned or not."""
        return len(self._nodes)

    def match(self, token_ids: Sequence[int], max_tokens: int, num_pools: int = 1) -> list[int]:
        """The longest chain of cached full blocks that hold the beginning of token_ids[:max_tokens] in num_pools pools.

        The caller becomes one more owner of each, to be passed to PageTable.adopt or freed, last block first.
        """
        if max_tokens < 0:
            raise ValueError(f"max_tokens must be >= 0, got {max_tokens}")
        size, node, blocks = self.block_size, self._root, []
        for start in range(0, min(len(token_ids), max_tokens) - size + 1, size):
            node = node.children.get(tuple(token_ids[start : start + size]))
            if node is None or node.block == 0 or node.num_pools < num_pools:
                break
            blocks.append(node.block)
        for block in blocks:
            self._allocator.claim_cached(block)
        return blocks

    def publish(self, table: PageTable, token_ids: Sequence[int]) -> int:
        """Make the table's full blocks findable, as far as they are committed and valid in every pool of the table.

        token_ids are the sequence's committed tokens, without drafts. Where an equal prefix is cached already it stays,
        unless the table has more pools. Returns how many blocks were added. O(1) when none has become full since the
        last call.
        """
        size = self.block_size
        if table.block_size != size:
            raise ValueError(f"table must have the cache's block size, {size}, got {table.block_size}")
        num_full = min(len(token_ids), *table.context_lens) // size
        if num_full <= table.num_published:
            return 0
        num_pools = len(table.context_lens)
        start, node = table.num_published, table.published_tail
        if not isinstance(node, _Node) or node.block == 0:
            # Nothing published yet, or the tail was another sequence's equal block, evicted since.
            start, node = 0, self._root
        num_new = 0
        for i in range(start, num_full):
            tokens = tuple(token_ids[i * size : (i + 1) * size])
            child = node.children.get(tokens) or _Node(node, tokens)
            if child.block == 0 or child.num_pools < num_pools:
                block, replaced = table.blocks[i], child.block
                self._allocator.mark_cached(block)  # which may refuse it: nothing has changed yet
                child.block, child.num_pools = block, num_pools
                self._nodes[block] = node.children[tokens] = child
                if replaced:
                    self._allocator.uncache(replaced)
                num_new += 1
            node = child
        table.num_published, table.published_tail = num_full, node
        return num_new

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
