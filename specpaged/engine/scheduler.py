"""What an engine asks of a scheduler: which sequences run in a step, how many tokens of each, how many drafts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from specpaged.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's share of a step.

    The target runs `num_new_tokens` known tokens from `context_len` on, then up to `num_draft_tokens` drafts.
    Drafts come only behind the last known token, where the step samples.
    """

    sequence: Sequence
    context_len: int
    num_new_tokens: int
    num_draft_tokens: int
    samples: bool  # the step reaches the last known token, whose logits give a new one


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """The sequences of one step, in the order in which they are packed.

    `forks` are KV block copies (source, destination) to be made in every pool before the step runs.
    """

    entries: tuple[ScheduledSequence, ...]
    forks: tuple[tuple[int, int], ...] = ()


class Scheduler(Protocol):
    """Owns who runs and who waits, and the blocks of both.

    It holds the sequences of an engine from `add` to `finish`; `running` are those that hold KV, oldest first.
    """

    running: list[Sequence]
    num_preemptions: int
    num_grouped_rounds: int  # rounds of sequences of one length; see research.exspec
    num_fallback_rounds: int

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]: ...

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence, whose whole length fits into the pool."""
        ...

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, running or waiting, and free its pages."""
        ...

    def schedule(self) -> ScheduledStep:
        """Decide the next step. Blocks for every token that it will write are reserved on return."""
        ...

    def check_integrity(self) -> None:
        """IntegrityError unless every block held is held by the sequences here, as often as it is shared."""
        ...
