"""One round without a model, which can be rolled back time and again."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from specpaged.drafting.draft import Draft
from specpaged.engine.kv_layout import CopiedBytes, KVLayout
from specpaged.engine.scheduler import ScheduledSequence
from specpaged.paging.block_allocator import BlockAllocator
from specpaged.paging.kv_cache import KVSpec
from specpaged.paging.page_table import TARGET, PageTable
from specpaged.research.build import dense_layout
from specpaged.research.dense_kv_cache import DenseKVCache
from specpaged.research.group import GroupKVCache
from specpaged.studies.kv_shape import KVShape

NUM_DRAFTS = 5
DRAFT = Draft([0] * NUM_DRAFTS)
BLOCK_SIZE = 16
EQUAL = 3  # tokens that all sequences gain in the pattern "equal"
MAX_BYTES = 2 << 30  # of a cell's dense KV; beyond, fewer layers stand for all
SECONDS = 0.4  # of a cell's rounds, unless two of them take longer
MAX_ROUNDS = 300


@dataclass(frozen=True)
class Cell:
    """One entry of the matrix: a rollback method, a batch size, a context and a pattern of accepted tokens.

    `context` is the context length, behind the round, of a sequence that gains EQUAL tokens.
    """

    rollback: str
    batch_size: int
    context: int
    pattern: str

    @property
    def context_before(self) -> int:
        """The context length of every sequence before the round, in tokens."""
        return self.context - EQUAL

    @property
    def num_gained(self) -> list[int]:
        """Tokens that each sequence gains, accepted drafts and bonus token: EQUAL, or 1, 2, .. 6, 1, .. if ragged."""
        if self.pattern == "equal":
            return [EQUAL] * self.batch_size
        gained = [1 + b % (NUM_DRAFTS + 1) for b in range(self.batch_size)]
        return [min(gained)] * self.batch_size if self.rollback == "batch_min" else gained


@dataclass(eq=False)
class _RoundSequence:
    """What a KV layout reads of a sequence."""

    num_tokens: int
    page_table: PageTable


class Round:
    """A round that can be rolled back time and again: every sequence had as much KV, all rows were aligned.

    `prepare` puts the sequences behind the target's pass, with KV for all drafts; `roll_back` is what a study times.
    """

    def __init__(self, cell: Cell, shape: KVShape, device: str = "cpu"):
        self.cell, self.device = cell, torch.device(device)
        self.num_layers = shape.num_layers
        # Columns for the context, a pass of K + 1 tokens, and the tokens that every row may have gained before it.
        columns = cell.context + 2 * (NUM_DRAFTS + 1)
        if cell.rollback != "truncate":
            num_rows = cell.batch_size * (2 if cell.rollback == "group" else 1)  # and as many caches
            num_bytes = shape.bytes_per_token * columns * num_rows
            self.num_layers = max(1, min(shape.num_layers, MAX_BYTES * shape.num_layers // num_bytes))
        self.scale = shape.num_layers / self.num_layers
        spec = KVSpec(((shape.num_kv_heads, shape.head_dim),) * self.num_layers)
        size, dtype = cell.batch_size, shape.torch_dtype
        if cell.rollback == "truncate":
            self.kv_layout = KVLayout(BLOCK_SIZE)
            self.allocator = BlockAllocator(size * -(-columns // BLOCK_SIZE))
        else:
            if cell.rollback == "group":
                cache: DenseKVCache = GroupKVCache(spec, size, columns, dtype, device, size)
            else:
                cache = DenseKVCache(spec, size, columns, dtype, device)
            for tensor in cache.tensors:
                tensor.zero_()  # so that the memory is there
            self.kv_layout = dense_layout(cell.rollback, [cache], columns, size)
            self.allocator = BlockAllocator(size)
        self.context_lens = [cell.context_before + gained for gained in cell.num_gained]
        # What they know behind the round: the last token has no KV.
        self.sequences = [
            _RoundSequence(context_len + 1, self.kv_layout.new_table(self.allocator, 1))
            for context_len in self.context_lens
        ]

    def prepare(self) -> None:
        """Put the sequences behind the target's pass of the round: nothing of this is timed."""
        context = self.cell.context_before
        written = context + NUM_DRAFTS + 1
        for sequence in self.sequences:
            table = sequence.page_table
            table.truncate(TARGET, min(context, table.context_lens[TARGET]))
            table.reserve(written)
            table.advance(TARGET, context - table.context_lens[TARGET])
        if self.cell.rollback == "group":
            self._prepare_group()
        elif self.cell.rollback != "truncate":
            for row, sequence in enumerate(self.sequences):
                sequence.page_table.row, sequence.page_table.start = row, 0
                sequence.page_table.known_end = context + 1
            self.kv_layout.length = context
        for sequence in self.sequences:
            sequence.page_table.advance(TARGET, NUM_DRAFTS + 1)

    def _prepare_group(self) -> None:
        """Let the caches and the rows hold the context: behind the last round another batch may have had the rows."""
        for sequence in self.sequences:
            table = sequence.page_table
            table.num_cached = [self.cell.context_before]
        self.kv_layout.place(self._entries())

    def _entries(self) -> list[ScheduledSequence]:
        return [
            ScheduledSequence(sequence, sequence.page_table.context_lens[TARGET], 1, samples=True, draft=DRAFT)
            for sequence in self.sequences
        ]

    def roll_back(self) -> CopiedBytes:
        """Truncate, and realign as the method does; bytes of KV written by copying, of the layers that are there.

        For "group" it includes putting the next round's batch together.
        """
        for sequence, context_len in zip(self.sequences, self.context_lens, strict=True):
            sequence.page_table.truncate(TARGET, context_len)
        self.kv_layout.copied.rollback = self.kv_layout.copied.gather = self.kv_layout.copied.other = 0
        self.kv_layout.realign(self.sequences)
        if self.cell.rollback == "group":
            self.kv_layout.place(self._entries())
        return self.kv_layout.copied

    def seconds(self) -> tuple[list[float], CopiedBytes]:
        """Wall times in seconds of rounds after one that warms up, and the bytes that one round copies."""
        self.prepare()
        self._timed()  # warms up
        times: list[float] = []
        rounds = 1
        while len(times) < rounds:
            self.prepare()
            seconds, copied = self._timed()
            times.append(seconds)
            rounds = num_rounds(times[0])
        return times, copied

    def _timed(self) -> tuple[float, CopiedBytes]:
        self._wait()
        start = time.perf_counter()
        copied = self.roll_back()
        self._wait()
        return time.perf_counter() - start, copied

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def num_rounds(seconds: float) -> int:
    """How often to repeat what takes so long: as SECONDS allow, but twice at least, and at most MAX_ROUNDS times."""
    return max(2, min(MAX_ROUNDS, round(SECONDS / max(seconds, 1e-9))))
