"""A sequence: one line of tokens on its way from prompt to stop. Ints only, no torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specpaged.paging.page_table import PageTable
    from specpaged.sampling_params import SamplingParams


class SequenceStatus(enum.Enum):
    """Where a sequence stands; FINISHED is final."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True)
class SequenceCounters:
    """What speculation did for one sequence; vLLM's definitions of the rates.

    A *draft* is a verify row set that held at least one draft token. Accepted tokens are counted before a
    stop cuts the run, emitted ones after.
    """

    rounds: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    cached_prompt_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)  # [a] = drafts of which a tokens were accepted

    def record_draft(self, num_draft_tokens: int, num_accepted: int) -> None:
        """One verified draft of at least one token."""
        self.drafts += 1
        self.draft_tokens += num_draft_tokens
        self.accepted_tokens += num_accepted
        histogram = self.acceptance_histogram
        histogram.extend([0] * (num_accepted + 1 - len(histogram)))
        histogram[num_accepted] += 1


class Sequence:
    """Known tokens (prompt, then output), the page table of their KV, and the state of the request.

    Changed only by the scheduler (status, pages) and by the engine's commit (tokens, counters).
    """

    __slots__ = (
        "child_idx",
        "counters",
        "error",
        "finish_reason",
        "fork_source",
        "logprobs",
        "max_draft_tokens",
        "num_prompt_tokens",
        "output_token_ids",
        "page_table",
        "params",
        "prompt_logprobs",
        "request_id",
        "sampling_request",
        "seed",
        "status",
        "stop_checker",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        seed: int,
        page_table: PageTable,
        max_draft_tokens: int,
        child_idx: int = 0,
    ):
        self.request_id = request_id
        self.child_idx = child_idx
        self.params = params
        self.seed = seed
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.output_token_ids: list[int] = []
        self.page_table = page_table
        self.max_draft_tokens = max_draft_tokens
        self.fork_source: Sequence | None = None
        self.status = SequenceStatus.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.counters = SequenceCounters()
        self.logprobs: list[Any] | None = None
        self.prompt_logprobs: list[Any] | None = None
        self.sampling_request: Any = None  # built once by the engine; holds output_token_ids by reference
        self.stop_checker: Any = None

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt's tokens (a copy)."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output. The last one's KV is usually not there yet."""
        return len(self.token_ids)

    @property
    def is_finished(self) -> bool:
        """Whether the sequence has ended, for whatever reason."""
        return self.status is SequenceStatus.FINISHED

    def append(self, token_id: int) -> None:
        """One more output token."""
        self.token_ids.append(token_id)
        self.output_token_ids.append(token_id)

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}/{self.child_idx}, {self.status.name}, prompt {self.num_prompt_tokens}, "
            f"output {len(self.output_token_ids)}, context {self.page_table.context_lens})"
        )
