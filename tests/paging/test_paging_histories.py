"""Random histories of everything that may happen to a sequence's pages, against a slow simulation.

The simulation remembers, for every slot of both pools, *whose KV* was written there. The KV of a token depends on
every token before it, so what a slot holds is named by the whole line of tokens that ends there: its *history*.
"""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specpaged.paging.block_allocator import BlockAllocator, OutOfBlocksError
from specpaged.paging.page_table import DRAFT, TARGET, PageTable
from specpaged.paging.prefix_cache import PrefixCache

NUM_POOLS = 2
NUM_STEMS = 2
whole = st.integers(0, 10_000)  # taken modulo whatever is possible at that point
mostly = st.sampled_from([True, True, True, False])
token = st.integers(0, 1)  # few tokens: equal prefixes, and drafts that are right, are frequent


class Histories:
    """Lines of tokens as ints: two are equal iff all their tokens are."""

    def __init__(self):
        self._ids: dict[tuple[int, int], int] = {}

    def of(self, token_ids) -> list[int]:
        """[i] = the line token_ids[: i + 1]."""
        line, lines = 0, []
        for token_id in token_ids:
            line = self._ids.setdefault((line, token_id), len(self._ids) + 1)
            lines.append(line)
        return lines


class Line:
    """A sequence of the simulation. The last token has no target KV yet, except in the middle of a prefill."""

    def __init__(self, table: PageTable, token_ids: list[int]):
        self.table = table
        self.token_ids = token_ids  # committed
        self.drafts: list[int] | None = None  # between the target's pass and the verdict
        self.owned: list[int] = []  # the blocks as the simulation expects them

    @property
    def num_pools(self) -> int:
        return len(self.table.context_lens)

    @property
    def written(self) -> list[int]:
        return self.token_ids + (self.drafts or [])


class PagingHistory(RuleBasedStateMachine):
    @initialize(block_size=st.sampled_from([1, 4, 16]), num_blocks=st.integers(2, 12))
    def build(self, block_size, num_blocks):
        self.size = block_size
        self.allocator = BlockAllocator(num_blocks)
        self.cache = PrefixCache(self.allocator, block_size)
        self.histories = Histories()
        self.stems = [[(i * (stem + 3) // 2) % 2 for i in range(200)] for stem in range(NUM_STEMS)]
        num_slots = (num_blocks + 1) * block_size
        self.memory: list[list[int | None]] = [[None] * num_slots for _ in range(NUM_POOLS)]
        self.lines: list[Line] = []
        self.intended: Counter[int] = Counter()  # owners that a block has on purpose
        self.committed: set[int] = set()  # every history that was verified at some time

    # The simulation's own bookkeeping

    def pick(self, choice: int) -> Line:
        return self.lines[choice % len(self.lines)]

    def commit(self, line: Line, token_ids: list[int]) -> None:
        line.token_ids = line.token_ids + token_ids
        self.committed.update(self.histories.of(line.token_ids))

    def give(self, line: Line, blocks) -> None:
        line.owned += blocks
        self.intended.update(blocks)

    def take(self, line: Line, num_kept: int) -> int:
        dropped = line.owned[num_kept:]
        del line.owned[num_kept:]
        self.intended.subtract(dropped)
        return len(dropped)

    def num_free(self) -> int:
        return self.allocator.num_blocks - len(+self.intended)

    def snapshot(self):
        blocks = range(1, self.allocator.num_blocks + 1)
        return (
            [(self.allocator.ref_count(b), self.allocator.is_cached(b)) for b in blocks],
            self.allocator.num_free,
            [(list(line.table.blocks), list(line.table.context_lens)) for line in self.lines],
        )

    def slot(self, line: Line, position: int) -> int:
        return line.table.blocks[position // self.size] * self.size + position % self.size

    def reserve(self, line: Line, num_tokens: int) -> bool:
        """Reserves, or finds that everything is as it was."""
        table = line.table
        num_new = max(0, -(-num_tokens // self.size) - len(line.owned))
        valid = table.context_lens[TARGET]
        written = line.owned[valid // self.size : -(-num_tokens // self.size)] if num_tokens > valid else []
        shared = any(self.intended[block] > 1 for block in written)
        if shared or num_new > self.num_free():
            before = self.snapshot()
            with pytest.raises(ValueError if shared else OutOfBlocksError):
                table.reserve(num_tokens)
            assert self.snapshot() == before
            return False
        table.reserve(num_tokens)
        new = table.blocks[len(line.owned) :]
        assert len(new) == num_new
        assert all(self.intended[block] == 0 for block in new), "a block was handed out that has an owner"
        self.give(line, new)
        return True

    def write(self, line: Line, pool: int, num_tokens: int) -> None:
        """A forward pass: KV of the next num_tokens tokens. A drafter catches up in blocks that others may own, too."""
        start = line.table.context_lens[pool]
        known = line.table.context_lens[TARGET]
        lines = self.histories.of(line.written)
        for position in range(start, start + num_tokens):
            slot = self.slot(line, position)
            block = slot // self.size
            assert block != 0, "the null block is written"
            if pool == TARGET or position >= known:
                assert self.intended[block] == 1, "a block is written that others own too"
                assert not self.allocator.is_cached(block), "a block is written that others may find"
            self.memory[pool][slot] = lines[position]
        line.table.advance(pool, num_tokens)

    def truncate(self, line: Line, pool: int, num_tokens: int) -> None:
        table = line.table
        longest = max([num_tokens, *(n for other, n in enumerate(table.context_lens) if other != pool)])
        assert table.truncate(pool, num_tokens) == self.take(line, -(-longest // self.size))

    def release(self, line: Line) -> None:
        assert line.table.free() == self.take(line, 0)
        assert line.table.context_lens == [0] * line.num_pools
        line.drafts = None

    def match(self, line: Line) -> None:
        """Fills an empty table from the cache; at least the last token is left to run."""
        blocks, context_lens = self.cache.match(line.token_ids, len(line.token_ids) - 1, line.num_pools)
        line.table.adopt(blocks, context_lens)
        self.give(line, blocks)

    # What may happen

    @rule(stem=whole, length=whole, tail=token, drafts=mostly, use_cache=mostly, bonus=st.none() | token)
    def admit(self, stem, length, tail, drafts, use_cache, bonus):
        """A new sequence, of one pool if it never drafts; with a bonus token, its whole prompt is run at once."""
        token_ids = [*self.stems[stem % NUM_STEMS][: length % (3 * self.size + 3)], tail]
        line = Line(PageTable(self.allocator, self.size, NUM_POOLS if drafts else 1), [])
        self.commit(line, token_ids)
        self.lines.append(line)
        if use_cache:
            self.match(line)
        if bonus is not None:
            self.run_line(line, None, bonus)

    @precondition(lambda self: self.lines)
    @rule(choice=whole, counts=st.none() | st.tuples(whole, whole), bonus=token, use_cache=mostly, publish=mostly)
    def run(self, choice, counts, bonus, use_cache, publish):
        """A chunk of a prefill or all of it, first or repeated; or one token of plain decoding."""
        line = self.pick(choice)
        if line.drafts is not None:
            return
        if use_cache and not line.table.blocks:
            self.match(line)
        self.run_line(line, counts, bonus)
        if publish:
            self.publish_line(line)

    def run_line(self, line: Line, counts: tuple[int, int] | None, bonus: int) -> None:
        """counts: tokens to run in each pool, modulo what is possible there; None = all."""
        table = line.table
        missing = len(line.token_ids) - table.context_lens[TARGET]
        count = missing if counts is None else counts[TARGET] % (missing + 1)
        reserved = table.context_lens[TARGET] + count
        if not self.reserve(line, reserved):
            return
        self.write(line, TARGET, count)
        if line.num_pools > DRAFT:
            missing = max(0, reserved - table.context_lens[DRAFT])
            self.write(line, DRAFT, missing if counts is None else counts[DRAFT] % (missing + 1))
        if table.context_lens[TARGET] == len(line.token_ids):
            self.commit(line, [bonus])

    @precondition(lambda self: any(self.can_draft(line) for line in self.lines))
    @rule(choice=whole, drafts=st.lists(token, min_size=1, max_size=6))
    def draft(self, choice, drafts):
        """Proposes K tokens and runs the target over the bonus and all of them."""
        ready = [line for line in self.lines if self.can_draft(line)]
        line = ready[choice % len(ready)]
        known, k = len(line.token_ids), len(drafts)
        if not self.reserve(line, known + k):
            return
        line.drafts = drafts
        self.write(line, DRAFT, known + k - 1 - line.table.context_lens[DRAFT])
        self.write(line, TARGET, k + 1)

    @staticmethod
    def can_draft(line: Line) -> bool:
        ready = line.drafts is None and line.table.context_lens[TARGET] == len(line.token_ids) - 1
        return ready and line.num_pools > DRAFT

    @precondition(lambda self: any(line.drafts is not None for line in self.lines))
    @rule(choice=whole, accepted=whole, bonus=token, target_first=st.booleans(), publish=mostly)
    def accept(self, choice, accepted, bonus, target_first, publish):
        pending = [line for line in self.lines if line.drafts is not None]
        line = pending[choice % len(pending)]
        known, k = len(line.token_ids), len(line.drafts)
        a = accepted % (k + 1)
        drafts, line.drafts = line.drafts, None
        self.commit(line, [*drafts[:a], bonus])
        kept = [(TARGET, (known - 1) + 1 + a), (DRAFT, known + min(a, k - 1))]
        for pool, num_tokens in kept if target_first else reversed(kept):
            self.truncate(line, pool, num_tokens)
        if publish:
            self.publish_line(line)

    @precondition(lambda self: self.lines)
    @rule(choice=whole)
    def publish(self, choice):
        """At any time, with drafts pending too."""
        self.publish_line(self.pick(choice))

    def publish_line(self, line: Line) -> None:
        """What is committed can be found afterwards; that nothing else can is an invariant."""
        self.cache.publish(line.table, line.token_ids)
        assert self.cache.publish(line.table, line.token_ids) == 0
        lengths = [len(line.token_ids), *line.table.context_lens]
        num_full = [min(lengths[: pool + 2]) // self.size for pool in range(line.num_pools)]
        assert line.table.num_published == num_full
        if all(self.allocator.is_cached(block) for block in line.table.blocks[: num_full[TARGET]]):
            found, context_lens = self.cache.match(line.token_ids, num_full[TARGET] * self.size, line.num_pools)
            assert len(found) == num_full[TARGET]
            assert all(found >= num * self.size for found, num in zip(context_lens, num_full, strict=True))
            for block in reversed(found):
                self.allocator.free(block)

    @precondition(lambda self: self.lines)
    @rule(choice=whole, length=whole, tail=token)
    def fork(self, choice, length, tail):
        parent = self.pick(choice)
        valid = min(len(parent.token_ids), parent.table.context_lens[TARGET])
        length %= valid + 1
        if length % self.size and self.num_free() == 0:
            before = self.snapshot()
            with pytest.raises(OutOfBlocksError):
                parent.table.fork(length)
            assert self.snapshot() == before
            return
        table, pairs = parent.table.fork(length)
        for source, destination in pairs:
            for memory in self.memory:
                start, end = source * self.size, destination * self.size
                memory[end : end + self.size] = memory[start : start + self.size]
        num_full = length // self.size
        assert table.blocks[:num_full] == parent.owned[:num_full]
        assert [source for source, _ in pairs] == parent.owned[num_full : -(-length // self.size)]
        assert table.blocks[num_full:] == [destination for _, destination in pairs]
        assert all(self.intended[block] == 0 for block in table.blocks[num_full:])
        child = Line(table, [])
        self.commit(child, [*parent.token_ids[:length], tail])
        self.give(child, table.blocks)
        self.lines.append(child)

    @precondition(lambda self: self.lines)
    @rule(choice=whole, length=whole, tail=token)
    def rewind(self, choice, length, tail):
        """Takes committed tokens back, published ones among them, and goes on differently."""
        line = self.pick(choice)
        if line.drafts is not None:
            return
        length %= len(line.token_ids)
        for pool in range(line.num_pools):
            self.truncate(line, pool, min(length, line.table.context_lens[pool]))
        line.token_ids = line.token_ids[:length]
        self.commit(line, [tail])

    @precondition(lambda self: self.lines)
    @rule(choice=whole, how=st.sampled_from(["preempt", "abort", "finish"]))
    def leave(self, choice, how):
        """At any time, with drafts pending or in the middle of a prefill."""
        line = self.pick(choice)
        if how == "finish":
            self.publish_line(line)
        self.release(line)
        if how != "preempt":
            self.lines.remove(line)

    # What must always hold

    @invariant()
    def owners_are_the_intended_ones(self):
        for line in self.lines:
            assert line.table.blocks == line.owned
            line.table.check_integrity()
        assert +self.intended == Counter(block for line in self.lines for block in line.table.blocks)
        self.allocator.check_integrity([line.table.blocks for line in self.lines])
        assert self.allocator.num_free == self.num_free()
        assert self.allocator.num_free + self.allocator.num_held == self.allocator.num_blocks

    @invariant()
    def every_sequence_reads_its_own_tokens(self):
        for line in self.lines:
            lines = self.histories.of(line.written)
            for pool, context_len in enumerate(line.table.context_lens):
                read = [self.memory[pool][self.slot(line, position)] for position in range(context_len)]
                assert read == lines[:context_len], (pool, context_len)

    @invariant()
    def what_can_be_found_is_committed_and_valid_in_as_many_pools_as_is_said(self):
        self.cache.check_integrity()
        pending = [(self.cache._root, [])]
        while pending:
            node, token_ids = pending.pop()
            pending += [(child, [*token_ids, *tokens]) for tokens, child in node.children.items()]
            if node.block:
                lines = self.histories.of(token_ids)[-self.size :]
                assert self.committed.issuperset(lines)
                start = node.block * self.size
                for memory in self.memory[: node.num_pools]:
                    assert memory[start : start + self.size] == lines

    @invariant()
    def the_null_block_is_never_written(self):
        assert all(memory[: self.size] == [None] * self.size for memory in self.memory)

    def teardown(self):
        if not hasattr(self, "lines"):
            return
        for line in self.lines:
            self.release(line)
        self.lines = []
        num_blocks = self.allocator.num_blocks
        assert (self.allocator.num_free, self.allocator.num_held) == (num_blocks, 0)
        self.allocator.check_integrity([])
        assert sorted(self.allocator.allocate() for _ in range(num_blocks)) == list(range(1, num_blocks + 1))
        assert self.cache.num_cached_blocks == 0
        self.cache.check_integrity()


PagingHistory.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=50,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestNoHistoryMixesUpSequences = PagingHistory.TestCase
