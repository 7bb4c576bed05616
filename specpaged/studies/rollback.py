"""What rolling back one round costs, by rollback method, without a model: time, and bytes of KV written by copying."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median

import torch

from specpaged.config import ROLLBACKS, EngineConfig
from specpaged.engine.kv_layout import CopiedBytes
from specpaged.studies import plots
from specpaged.studies.environment import environment
from specpaged.studies.kv_shape import KVShape
from specpaged.studies.result import Column, Result, Row
from specpaged.studies.rollback_round import BLOCK_SIZE, NUM_DRAFTS, Cell, Round
from specpaged.studies.workload import check_device, check_out

BATCH_SIZES = (1, 8, 32, 128)
CONTEXTS = (128, 2048, 8192)
PATTERNS = ("equal", "ragged")
MIN_CONTEXT = 8  # more than a round gains

COLUMNS = (
    Column("arm", "method"),
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


def available_rollbacks(device: str) -> list[str]:
    """The rollback methods that can run on a device."""
    return [rollback for rollback in ROLLBACKS if _why_not(rollback, device) is None]


def check_rollbacks(names: Sequence[str], device: str) -> list[str]:
    """The rollback methods, each once. Raises ValueError for one that is not known or cannot run on the device."""
    rollbacks = list(dict.fromkeys(name.strip() for name in names))
    for rollback in rollbacks:
        known = rollback in ROLLBACKS
        reason = _why_not(rollback, device) if known else f"is not known; allowed: {', '.join(ROLLBACKS)}"
        if reason is not None:
            raise ValueError(f"--arms: {rollback!r} {reason}")
    return rollbacks


def _why_not(rollback: str, device: str) -> str | None:
    try:
        EngineConfig(rollback=rollback, device=device)
    except ValueError as error:
        return f"cannot run here: {error}"
    return None


def cells(rollbacks: Sequence[str], batch_sizes: Sequence[int], contexts: Sequence[int]) -> Iterator[Cell]:
    """The matrix, "truncate" first in each of its fields."""
    for context in contexts:
        for batch_size in batch_sizes:
            for pattern in PATTERNS:
                for rollback in ["truncate", *(name for name in rollbacks if name != "truncate")]:
                    yield Cell(rollback, batch_size, context, pattern)


def row_of(cell: Cell, played: Round, times: Sequence[float], copied: CopiedBytes) -> Row:
    """What the matrix says of a cell; where few layers stand for all, bytes are scaled, and the time that they take."""
    scale = played.scale if copied.total else 1.0  # what copies nothing takes as long for any number of layers
    us = {"us": median(times), "min_us": min(times), "max_us": max(times)}
    mib = {"rollback_mib": copied.rollback, "gather_mib": copied.gather, "other_mib": copied.other}
    return {
        "arm": cell.rollback,
        "B": cell.batch_size,
        "context": cell.context,
        "pattern": cell.pattern,
        **{name: round(value * scale * 1e6, 3) for name, value in us.items()},
        **{name: value * scale / 2**20 for name, value in mib.items()},
        "total_mib": copied.total * scale / 2**20,
        "scaled": None if scale == 1 else f"{played.num_layers}, scaled",
    }


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """The rows, each with its time over that of "truncate" in the same field."""
    fields = {(row["B"], row["context"], row["pattern"]): row["us"] for row in rows if row["arm"] == "truncate"}
    return [row | {"over_truncate": row["us"] / fields[row["B"], row["context"], row["pattern"]]} for row in rows]


def result(rows: Sequence[Row], kv_shape: KVShape, threads: int, device: str = "cpu") -> Result:
    """The study's result: all rows of the matrix, with their ratios to "truncate"."""
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
    rollbacks: Sequence[str],
    batch_sizes: Sequence[int],
    contexts: Sequence[int],
    shape: KVShape,
    device: str,
    threads: int,
    out: object,
    progress: Callable[[str, int], Callable[[int], object]],
) -> Result:
    """Every rollback method in every field of the matrix.

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
    matrix = list(cells(rollbacks, batch_sizes, contexts))
    advance = progress("rollback", len(matrix))
    for cell in matrix:
        played = Round(cell, shape, device)
        rows.append(row_of(cell, played, *played.seconds()))
        del played
        advance(1)
    return result(rows, shape, threads, device)
