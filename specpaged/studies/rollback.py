"""What rolling back one round costs, by arm, without a model: time, and bytes of KV that are written by copying."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from specpaged.config import DTYPES, ROLLBACKS, EngineConfig
from specpaged.engine.kv_layout import CopiedBytes, KVLayout
from specpaged.engine.scheduler import ScheduledSequence
from specpaged.paging.block_allocator import BlockAllocator
from specpaged.paging.kv_cache import KVSpec
from specpaged.paging.page_table import TARGET, PageTable
from specpaged.research.build import dense_layout
from specpaged.research.dense_kv_cache import DenseKVCache
from specpaged.research.group import GroupKVCache
from specpaged.studies import plots
from specpaged.studies.environment import environment
from specpaged.studies.result import Column, Result, Row
from specpaged.studies.workload import check_device, check_out

NUM_DRAFTS = 5
BLOCK_SIZE = 16
BATCH_SIZES = (1, 8, 32, 128)
CONTEXTS = (128, 2048, 8192)
PATTERNS = ("equal", "ragged")
EQUAL = 3  # tokens that all sequences gain in the pattern "equal"
MIN_CONTEXT = 8  # more than a round gains
MAX_BYTES = 2 << 30  # of a cell's dense KV; beyond, fewer layers stand for all
SECONDS = 0.4  # of a cell's rounds, unless two of them take longer
MAX_ROUNDS = 300

COLUMNS = (
    Column("arm", "arm"),
    Column("B", "B", "d"),
    Column("context", "context", "d"),
    Column("pattern", "accepted"),
    Column("us", "us", ",.1f"),
    Column("min_us", "min", ",.1f"),
    Column("max_us", "max", ",.1f"),
    Column("over_truncate", "x truncate", ",.0f"),
    Column("rollback_mib", "rollback", ",.2f"),
    Column("gather_mib", "gather", ",.2f"),
    Column("other_mib", "other", ",.2f"),
    Column("total_mib", "MiB", ",.2f"),
    Column("scaled", "layers"),
)


@dataclass(frozen=True)
class KVShape:
    """One model's KV: what a token takes."""

    num_layers: int = 8
    num_kv_heads: int = 4
    head_dim: int = 32
    dtype: str = "float32"

    @classmethod
    def parse(cls, text: str) -> KVShape:
        """'L,Hkv,D' or 'L,Hkv,D,dtype'. ValueError."""
        numbers, dtype = text.split(","), "float32"
        if len(numbers) == 4:
            dtype = numbers.pop()
        if len(numbers) != 3 or not all(n.isdecimal() and int(n) > 0 for n in numbers) or dtype not in DTYPES[1:]:
            raise ValueError(
                f"--kv-shape={text!r} must be L,Hkv,D or L,Hkv,D,dtype, as in 8,4,32,float32; dtypes: "
                f"{', '.join(DTYPES[1:])}"
            )
        return cls(*map(int, numbers), dtype)

    @property
    def torch_dtype(self) -> torch.dtype:
        """As torch has it."""
        return getattr(torch, self.dtype)

    @property
    def bytes_per_token(self) -> int:
        """All layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.torch_dtype.itemsize

    def __str__(self) -> str:
        return f"L {self.num_layers}, Hkv {self.num_kv_heads}, D {self.head_dim}, {self.dtype}"


@dataclass(frozen=True)
class Cell:
    """One entry of the matrix. `context` is what a sequence that gains EQUAL tokens has behind the round."""

    arm: str
    batch_size: int
    context: int
    pattern: str

    @property
    def context_before(self) -> int:
        """Of all sequences, which are aligned."""
        return self.context - EQUAL

    @property
    def num_gained(self) -> list[int]:
        """a_i: accepted drafts and the bonus token, of NUM_DRAFTS + 1; ragged: 1, 2, .. 6, 1, .."""
        if self.pattern == "equal":
            return [EQUAL] * self.batch_size
        gained = [1 + b % (NUM_DRAFTS + 1) for b in range(self.batch_size)]
        return [min(gained)] * self.batch_size if self.arm == "batch_min" else gained


@dataclass(eq=False)
class _Line:
    """As much of a sequence as an arm looks at."""

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
        if cell.arm != "truncate":
            num_rows = cell.batch_size * (2 if cell.arm == "group" else 1)  # and as many caches
            num_bytes = shape.bytes_per_token * columns * num_rows
            self.num_layers = max(1, min(shape.num_layers, MAX_BYTES * shape.num_layers // num_bytes))
        self.scale = shape.num_layers / self.num_layers
        spec = KVSpec(((shape.num_kv_heads, shape.head_dim),) * self.num_layers)
        size, dtype = cell.batch_size, shape.torch_dtype
        if cell.arm == "truncate":
            self.kv_layout = KVLayout(BLOCK_SIZE)
            self.allocator = BlockAllocator(size * -(-columns // BLOCK_SIZE))
        else:
            if cell.arm == "group":
                cache: DenseKVCache = GroupKVCache(spec, size, columns, dtype, device, size)
            else:
                cache = DenseKVCache(spec, size, columns, dtype, device)
            for tensor in cache.tensors:
                tensor.zero_()  # so that the memory is there
            self.kv_layout = dense_layout(cell.arm, [cache], columns, size)
            self.allocator = BlockAllocator(size)
        self.kept = [cell.context_before + gained for gained in cell.num_gained]
        # What they know behind the round: the last token has no KV.
        self.lines = [_Line(kept + 1, self.kv_layout.new_table(self.allocator, 1)) for kept in self.kept]

    def prepare(self) -> None:
        """Behind the target's pass of the round: nothing of this is timed."""
        context = self.cell.context_before
        written = context + NUM_DRAFTS + 1
        for line in self.lines:
            table = line.page_table
            table.truncate(TARGET, min(context, table.context_lens[TARGET]))
            table.reserve(written)
            table.advance(TARGET, context - table.context_lens[TARGET])
        if self.cell.arm == "group":
            self._prepare_group()
        elif self.cell.arm != "truncate":
            for row, line in enumerate(self.lines):
                line.page_table.row, line.page_table.start = row, 0
                line.page_table.known_end = context + 1
            self.kv_layout.length = context
        for line in self.lines:
            line.page_table.advance(TARGET, NUM_DRAFTS + 1)

    def _prepare_group(self) -> None:
        """The caches hold the context, and so do the rows; behind the last round another batch may have had these."""
        for line in self.lines:
            table = line.page_table
            table.num_cached = [self.cell.context_before]
        self.kv_layout.place(self._entries())

    def _entries(self) -> list[ScheduledSequence]:
        return [
            ScheduledSequence(line, line.page_table.context_lens[TARGET], 1, True, DRAFT_OF_A_ROUND)
            for line in self.lines
        ]

    def roll_back(self) -> CopiedBytes:
        """Truncate, and what the arm does beyond; bytes of KV written by copying, of the layers that are there.

        For "group" it includes putting the next round's batch together.
        """
        for line, kept in zip(self.lines, self.kept, strict=True):
            line.page_table.truncate(TARGET, kept)
        self.kv_layout.copied.rollback = self.kv_layout.copied.gather = self.kv_layout.copied.other = 0
        self.kv_layout.realign(self.lines)
        if self.cell.arm == "group":
            self.kv_layout.place(self._entries())
        return self.kv_layout.copied

    def seconds(self) -> tuple[list[float], CopiedBytes]:
        """Wall times of rounds after one that warms up; the bytes of one."""
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


def available_arms(device: str) -> list[str]:
    """Those that can run on a device."""
    return [arm for arm in ROLLBACKS if _why_not(arm, device) is None]


def check_arms(arms: Sequence[str], device: str) -> list[str]:
    """The arms, each once. Raises ValueError for one that is not known or cannot run on the device."""
    arms = list(dict.fromkeys(arm.strip() for arm in arms))
    for arm in arms:
        reason = f"is not known; allowed: {', '.join(ROLLBACKS)}" if arm not in ROLLBACKS else _why_not(arm, device)
        if reason is not None:
            raise ValueError(f"--arms: {arm!r} {reason}")
    return arms


def _why_not(arm: str, device: str) -> str | None:
    try:
        EngineConfig(rollback=arm, device=device)
    except ValueError as error:
        return f"cannot run here: {error}"
    return None


def cells(arms: Sequence[str], batch_sizes: Sequence[int], contexts: Sequence[int]) -> Iterator[Cell]:
    """The matrix, "truncate" first in each of its fields."""
    for context in contexts:
        for batch_size in batch_sizes:
            for pattern in PATTERNS:
                for arm in ["truncate", *(arm for arm in arms if arm != "truncate")]:
                    yield Cell(arm, batch_size, context, pattern)


def row_of(cell: Cell, played: Round, times: Sequence[float], copied: CopiedBytes) -> Row:
    """What the matrix says of a cell; where few layers stand for all, bytes are scaled, and the time that they take."""
    scale = played.scale if copied.total else 1.0  # what copies nothing takes as long for any number of layers
    us = {"us": median(times), "min_us": min(times), "max_us": max(times)}
    mib = {"rollback_mib": copied.rollback, "gather_mib": copied.gather, "other_mib": copied.other}
    return {
        "arm": cell.arm,
        "B": cell.batch_size,
        "context": cell.context,
        "pattern": cell.pattern,
        **{name: round(value * scale * 1e6, 3) for name, value in us.items()},
        **{name: value * scale / 2**20 for name, value in mib.items()},
        "total_mib": copied.total * scale / 2**20,
        "scaled": None if scale == 1 else f"{played.num_layers}, scaled",
    }


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Each with its time over that of "truncate" in the same field."""
    fields = {(row["B"], row["context"], row["pattern"]): row["us"] for row in rows if row["arm"] == "truncate"}
    return [row | {"over_truncate": row["us"] / fields[row["B"], row["context"], row["pattern"]]} for row in rows]


def result(rows: Sequence[Row], kv_shape: KVShape, threads: int, device: str = "cpu") -> Result:
    """The matrix."""
    return Result(
        "rollback",
        f"one round's rollback; KV of one model, {kv_shape}; {device}",
        COLUMNS,
        with_ratios(rows),
        environment(threads),
        {"kv_shape": str(kv_shape), "num_drafts": NUM_DRAFTS, "block_size": BLOCK_SIZE, "device": device},
        "medians of wall times, truncation and the allocator's work included; MiB of KV written by copying because "
        "drafts were rejected, so that attention can read it, and otherwise; equal: each sequence gains 3 tokens; "
        "ragged: 1 to 6, in turn (batch_min: 1); context: behind a gain of 3; scaled: fewer layers ran, as all would "
        "take more than 2 GiB",
        draw=lambda matrix, out: [plots.rollback(matrix, out / "rollback.png")],
    )


def run(
    *,
    arms: Sequence[str],
    batch_sizes: Sequence[int],
    contexts: Sequence[int],
    shape: KVShape,
    device: str,
    threads: int,
    out: object,
    progress: Callable[[str, int], Callable[[int], object]],
) -> Result:
    """Every arm in every field of the matrix.

    Raises:
        ValueError: naming the option, its value and what is allowed, before any cell.
    """
    check_out(out)
    check_device(device)
    for context in contexts:
        if context < MIN_CONTEXT:
            raise ValueError(f"--context-lens holds {context}; allowed: {MIN_CONTEXT} or more")
    torch.set_num_threads(threads)
    rows = []
    matrix = list(cells(arms, batch_sizes, contexts))
    advance = progress("rollback", len(matrix))
    for cell in matrix:
        played = Round(cell, shape, device)
        rows.append(row_of(cell, played, *played.seconds()))
        del played
        advance(1)
    return result(rows, shape, threads, device)
