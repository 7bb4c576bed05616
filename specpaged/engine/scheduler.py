"""What an engine asks of a scheduler: which sequences run in a step, how many tokens of each, which drafts."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from specpaged.drafting.draft import NO_DRAFT, Draft
from specpaged.engine.sequence import Sequence


class ScheduledSequence(NamedTuple):
    """One sequence's share of a step, as its scheduler decides it.

    Of it come a RaggedRow, which the target's pass runs, the rows of VerifyRows, which that pass gives the verifier,
    and, once it has been committed, a DraftRow, which the drafter runs.

    The target runs `num_new_tokens` known tokens from `context_len` on, then `draft`: as much of the sequence's pending
    draft as the step has room for. Drafts come only behind the last known token, where the step samples.
    """

    sequence: Sequence
    context_len: int
    num_new_tokens: int
    samples: bool  # the step reaches the last known token, whose logits give a new one
    draft: Draft = NO_DRAFT

    @property
    def num_draft_tokens(self) -> int:
        """K of this sequence in this step."""
        return len(self.draft.token_ids)

    @property
    def num_known(self) -> int:
        """Known tokens that have KV behind the step's pass."""
        return self.context_len + self.num_new_tokens

    @property
    def in_prefill(self) -> bool:
        """Whether it is more than the one known token that a decode runs, or leads to no new one."""
        return self.num_new_tokens > 1 or not self.samples


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """The sequences of one step, in the order in which they are packed.

    `forks` are KV block copies (source, destination) to be made in every pool before the step runs; `preempted` have
    given up their KV.
    """

    entries: tuple[ScheduledSequence, ...]
    forks: tuple[tuple[int, int], ...] = ()
    preempted: tuple[Sequence, ...] = ()


class Scheduler(Protocol):
    """Owns who runs and who waits, and the blocks of both.

    It holds the sequences of an engine from `add` to `finish`; `running` are those that hold KV, oldest first.
    """

    running: list[Sequence]
    num_preemptions: int
    num_grouped_rounds: int  # rounds of sequences of one length; see research.exspec
    num_fallback_rounds: int
    num_short_steps: int  # see scheduling.draft_slots
    num_released_drafts: int
    num_without_draft_kv: int

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

    def preempt_all(self) -> list[Sequence]:
        """Take the KV of all that run, who wait then, oldest first; who they are."""
        ...

    def reserve_drafts(self, sequences: SequenceOf[Sequence], wanted: SequenceOf[int] | None = None) -> list[int]:
        """How many draft tokens to make for sequences that have just been committed; slots for them are reserved.

        No more than are `wanted` of each; None: as many as the configuration says for the number of running sequences.
        """
        ...

    def check_integrity(self) -> None:
        """IntegrityError unless every block held is held by the sequences here, as often as it is shared."""
        ...
