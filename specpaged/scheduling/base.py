"""What a scheduler decides: which sequences run in a step, how many tokens of each, how many drafts."""

from __future__ import annotations

from dataclasses import dataclass

from specpaged.sequence import Sequence


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
