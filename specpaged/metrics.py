"""Counters of an engine and of its requests. No printing, no device synchronisation."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

from typing_extensions import override

if TYPE_CHECKING:
    from specpaged.engine.kv_layout import CopiedBytes
    from specpaged.engine.scheduler import Scheduler
    from specpaged.modeling.model_runner import ModelRunner

STAGES = ("schedule", "score", "verify", "commit", "propose")


@dataclass
class DraftCounters:
    """How drafts fared. A draft holds at least one token; accepted tokens are counted before a stop cuts the run."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / verified draft tokens; None where nothing was drafted."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted / drafts (vLLM's definition); None where nothing was drafted."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else None

    def record_drafts(self, num_draft_tokens: Sequence[int], num_accepted: Sequence[int]) -> None:
        """Verified drafts of at least one token each."""
        self.drafts += len(num_draft_tokens)
        self.draft_tokens += sum(num_draft_tokens)
        self.accepted_tokens += sum(num_accepted)


@dataclass
class RequestMetrics(DraftCounters):
    """What speculation did for one sequence, or for a request: the sum over its `n` sequences."""

    rounds: int = 0
    preemptions: int = 0
    cached_prompt_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)  # [a] = drafts of which a tokens were accepted

    def record_draft(self, num_draft_tokens: int, num_accepted: int) -> None:
        """One verified draft of at least one token: the only one of a step."""
        self.drafts += 1
        self.draft_tokens += num_draft_tokens
        self.accepted_tokens += num_accepted
        histogram = self.acceptance_histogram
        if num_accepted >= len(histogram):
            histogram.extend([0] * (num_accepted + 1 - len(histogram)))
        histogram[num_accepted] += 1

    @override
    def record_drafts(self, num_draft_tokens: Sequence[int], num_accepted: Sequence[int]) -> None:
        super().record_drafts(num_draft_tokens, num_accepted)
        histogram = self.acceptance_histogram
        most = max(num_accepted, default=-1)
        if most >= len(histogram):
            histogram.extend([0] * (most + 1 - len(histogram)))
        for accepted in num_accepted:
            histogram[accepted] += 1

    @classmethod
    def total(cls, of_sequences: Iterable[RequestMetrics]) -> RequestMetrics:
        """The sum, position by position for the histogram."""
        total = cls()
        for metrics in of_sequences:
            for name, value in vars(metrics).items():
                if name != "acceptance_histogram":
                    setattr(total, name, getattr(total, name) + value)
            pairs = zip_longest(total.acceptance_histogram, metrics.acceptance_histogram, fillvalue=0)
            total.acceptance_histogram = [a + b for a, b in pairs]
        return total


class PartCounts(NamedTuple):
    """What the scheduler, the KV layout and the model runners of an engine have counted since they were made."""

    preemptions: int = 0
    grouped_rounds: int = 0
    fallback_rounds: int = 0
    rollback_bytes: int = 0
    gathered_bytes: int = 0
    other_copied_bytes: int = 0
    filler_rows: int = 0
    short_steps: int = 0
    released_draft_tokens: int = 0
    requests_without_draft_kv: int = 0

    @classmethod
    def of(cls, scheduler: Scheduler, copied: CopiedBytes, runners: Sequence[ModelRunner]) -> PartCounts:
        """What they have counted by now."""
        return cls(
            preemptions=scheduler.num_preemptions,
            grouped_rounds=scheduler.num_grouped_rounds,
            fallback_rounds=scheduler.num_fallback_rounds,
            rollback_bytes=copied.rollback,
            gathered_bytes=copied.gather + sum(runner.gathered_bytes for runner in runners),
            other_copied_bytes=copied.other,
            filler_rows=sum(runner.filler_rows for runner in runners),
            short_steps=scheduler.num_short_steps,
            released_draft_tokens=scheduler.num_released_drafts,
            requests_without_draft_kv=scheduler.num_without_draft_kv,
        )


class StageTimer:
    """Several in every step: a class of its own, as contextlib's generators take four times as long."""

    __slots__ = ("_name", "_seconds", "_start")

    def __init__(self, seconds: dict[str, float], name: str):
        self._seconds, self._name = seconds, name

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self._seconds[self._name] += time.perf_counter() - self._start


@dataclass
class EngineMetrics(DraftCounters):
    """Totals since the engine started; the two gauges (in use, unverified) are of the last step.

    A round is a step in which some sequence samples. Unverified KV tokens are those that a target pass wrote for
    drafts: the memory that speculation holds between scoring and commit. Rollback covers both pools; its seconds
    include the allocator's work, and all copies that a dense KV layout makes. Bytes are those of KV that was written by
    copying: for rollback, to be read by attention ("gathered"), and for the layout's own sake ("other"). Grouped rounds
    ran several sequences of one length, fallback rounds several of any: EXSPEC's. Failed steps raised: one is run
    anew, a second one without a token between them is the caller's; requests without drafts have lost them to a NaN.
    Proposed tokens were drafted, whether or not they were selected to be verified. Draft blocks are those of a pool
    that is the draft's alone; requests without draft KV found no room in it, or no more, and decode plainly. In short
    steps drafts had no blocks of their own, as the target's pool had run out of them; released draft tokens were given
    back for that before they were verified. In overlapped steps, each of one half of the batch, drafts were made for
    the other one meanwhile: their seconds are wall time, of which "score" and "verify" have as much as the one took,
    and "propose" as much as the other.
    """

    steps: int = 0
    rounds: int = 0
    prompt_tokens: int = 0
    emitted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    preemptions: int = 0
    rollbacks: int = 0
    rolled_back_tokens: int = 0
    rollback_blocks_freed: int = 0
    rollback_bytes: int = 0
    rollback_seconds: float = 0.0
    unverified_kv_tokens: int = 0
    peak_unverified_kv_tokens: int = 0
    blocks_in_use: int = 0
    peak_blocks_in_use: int = 0
    draft_blocks_in_use: int = 0
    peak_draft_blocks_in_use: int = 0
    gathered_bytes: int = 0
    other_copied_bytes: int = 0
    fork_copied_bytes: int = 0
    grouped_rounds: int = 0
    fallback_rounds: int = 0
    filler_rows: int = 0
    failed_steps: int = 0
    failed_proposals: int = 0
    proposed_tokens: int = 0
    requests_without_drafts: int = 0
    short_steps: int = 0
    released_draft_tokens: int = 0
    requests_without_draft_kv: int = 0
    overlapped_steps: int = 0
    overlapped_seconds: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    @override
    def record_drafts(self, num_draft_tokens: Sequence[int], num_accepted: Sequence[int]) -> None:
        super().record_drafts(num_draft_tokens, num_accepted)
        per_position = self.accepted_per_position
        per_position.extend([0] * (max(num_draft_tokens, default=0) - len(per_position)))
        num_standing = 0
        for position in reversed(range(max(num_accepted, default=0))):
            num_standing += num_accepted.count(position + 1)
            per_position[position] += num_standing

    @property
    def token_efficiency(self) -> float | None:
        """Accepted / drafted tokens, verified or not; None where nothing was drafted. See `acceptance_rate` for those
        that were verified, which TETRIS calls the verification success rate.
        """
        return self.accepted_tokens / self.proposed_tokens if self.proposed_tokens else None

    def record_blocks(self, num_held: int, num_draft_held: int = 0) -> None:
        """The blocks that sequences hold in this step, and those that are the draft's alone."""
        self.blocks_in_use, self.draft_blocks_in_use = num_held, num_draft_held
        self.peak_blocks_in_use = max(self.peak_blocks_in_use, num_held)
        self.peak_draft_blocks_in_use = max(self.peak_draft_blocks_in_use, num_draft_held)

    def add_parts(self, before: PartCounts, now: PartCounts) -> None:
        """Add what was counted between two moments."""
        self.preemptions += now.preemptions - before.preemptions
        self.grouped_rounds += now.grouped_rounds - before.grouped_rounds
        self.fallback_rounds += now.fallback_rounds - before.fallback_rounds
        self.rollback_bytes += now.rollback_bytes - before.rollback_bytes
        self.gathered_bytes += now.gathered_bytes - before.gathered_bytes
        self.other_copied_bytes += now.other_copied_bytes - before.other_copied_bytes
        self.filler_rows += now.filler_rows - before.filler_rows
        self.short_steps += now.short_steps - before.short_steps
        self.released_draft_tokens += now.released_draft_tokens - before.released_draft_tokens
        self.requests_without_draft_kv += now.requests_without_draft_kv - before.requests_without_draft_kv

    def stage(self, name: str) -> StageTimer:
        """Adds the wall time of a `with` block to a stage, unless it raises."""
        return StageTimer(self.seconds, name)

    def as_dict(self) -> dict:
        """Plain data, with the derived rates."""
        names = ("acceptance_rate", "mean_acceptance_length", "token_efficiency")
        rates = {name: getattr(self, name) for name in names}
        return asdict(self) | rates
