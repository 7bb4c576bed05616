"""Dense KV layouts without a model: KV whose every element says which token of which sequence it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specpaged.drafting.draft import Draft
from specpaged.engine.scheduler import ScheduledSequence
from specpaged.paging.block_allocator import BlockAllocator
from specpaged.paging.kv_cache import KVSpec
from specpaged.paging.page_table import DRAFT, TARGET
from specpaged.research.build import dense_layout
from specpaged.research.dense_kv_cache import DenseKVCache
from specpaged.research.dense_table import DenseTable
from specpaged.research.group import GroupKVCache

K = 4
MAX_MODEL_LEN = 60
SPECS = (KVSpec(((1, 2), (2, 3), (1, 2))), KVSpec(((1, 4),)))  # target's, draft's


@dataclass(eq=False)
class Line:
    """What a KV layout knows of a sequence."""

    name: int
    num_tokens: int
    page_table: DenseTable


class World:
    """Sequences under one KV layout, whose rounds are played by hand."""

    def __init__(self, rollback: str, num_rows: int, num_sequences: int | None = None):
        num_sequences = num_sequences or num_rows
        columns, dtype = MAX_MODEL_LEN + K, torch.float32
        if rollback == "group":
            columns += K
            self.caches = [GroupKVCache(spec, num_rows, columns, dtype, "cpu", num_sequences) for spec in SPECS]
        else:
            self.caches = [DenseKVCache(spec, num_rows, columns, dtype, "cpu") for spec in SPECS]
        for cache in self.caches:
            for stack in cache.stacks:
                stack.fill_(float("nan"))
        self.kv_layout = dense_layout(rollback, self.caches, MAX_MODEL_LEN, num_rows)
        self.allocator = BlockAllocator(num_sequences)
        self.lines: list[Line] = []
        self.num_lines = 0
        self.played: list[Line] = []  # those of the last round

    def add(self, num_prompt_tokens: int) -> Line:
        """A sequence that waits for its prefill."""
        table = self.kv_layout.new_table(self.allocator, len(self.caches))
        line = Line(self.num_lines, num_prompt_tokens, table)
        self.num_lines += 1
        self.lines.append(line)
        return line

    def remove(self, line: Line) -> None:
        """It has ended."""
        self.lines.remove(line)
        line.page_table.free()

    def play(self, accepted: dict[Line, int]) -> None:
        """A round of these sequences up to its commit, each with K drafts of which so many are accepted."""
        entries = []
        for line in accepted:
            context_len = line.page_table.context_lens[TARGET]
            line.page_table.reserve(line.num_tokens + K)
            num_new_tokens = line.num_tokens - context_len
            entries.append(ScheduledSequence(line, context_len, num_new_tokens, samples=True, draft=Draft([0] * K)))
        self.kv_layout.place(entries)
        for line in accepted:
            self.check_row(line)
            self._write(line, TARGET, line.num_tokens + K)
        for line, num_accepted in accepted.items():
            for pool, context_len in enumerate(line.page_table.context_lens):
                line.page_table.truncate(pool, min(context_len, line.num_tokens + num_accepted))
            line.num_tokens += num_accepted + 1
        self.played = list(accepted)

    def realign(self, num_drafts: int | None = K) -> None:
        """Behind a round's commit, and then the drafts of those who were in it: with 0, the draft only catches up."""
        self.kv_layout.realign(self.lines)
        self.kv_layout.check_integrity()
        self.allocator.check_integrity([line.page_table.blocks for line in self.lines])
        for line in self.lines:
            if line.page_table.row is not None:
                self.check_row(line)
        if num_drafts is not None:
            for line in self.played:
                if line in self.lines:
                    self._write(line, DRAFT, line.num_tokens + num_drafts - 1)
        self.kv_layout.check_integrity()

    def check_row(self, line: Line) -> None:
        """I2, for both models: the token at position j lies in column start + j of the row."""
        table = line.page_table
        for pool, cache in enumerate(self.caches):
            for layer in cache.layers:
                row = layer.view(cache.num_rows, cache.num_columns, -1)[table.row, table.start :]
                for position in range(table.context_lens[pool]):
                    assert (row[position] == self.marker(line, pool, position)).all()

    def kept_bytes(self, line: Line) -> int:
        """Bytes of the sequence's KV in both pools."""
        return sum(
            length * cache.bytes_per_token
            for length, cache in zip(line.page_table.context_lens, self.caches, strict=True)
        )

    @staticmethod
    def marker(line: Line, pool: int, position: int) -> float:
        """What every element of a token's KV is."""
        return 10_000 * pool + 100 * line.name + position

    def _write(self, line: Line, pool: int, length: int) -> None:
        table, cache = line.page_table, self.caches[pool]
        assert table.start + length <= cache.num_columns
        for position in range(table.context_lens[pool], length):
            for layer in cache.layers:
                layer[table.entries[0] + position] = self.marker(line, pool, position)
        table.advance(pool, length - table.context_lens[pool])
