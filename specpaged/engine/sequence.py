"""A sequence: one line of tokens on its way from prompt to stop. Ints only, no torch."""

from __future__ import annotations

import enum
import hashlib
import logging
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any

from specpaged.drafting.draft import NO_DRAFT, Draft
from specpaged.metrics import RequestMetrics

if TYPE_CHECKING:
    from specpaged.paging.page_table import PageTable
    from specpaged.sampling_params import SamplingParams

logger = logging.getLogger("specpaged")


def derived_seed(seed: int, count: int) -> int:
    """The seed of the count-th sequence that came without one to an engine of this seed: 48 bits."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{count}".encode(), digest_size=6).digest(), "little")


class SequenceStatus(enum.Enum):
    """Where a sequence stands; FINISHED is final."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Sequence:
    """Known tokens (prompt, then output), the page table of their KV, and the state of the request.

    Once queued it is changed only by the scheduler (status, pages, what it counts) and by the step: by its commit, and
    by its propose, which leaves the draft that a later step may verify with it.
    """

    __slots__ = (
        "child_idx",
        "draft",
        "error",
        "finish_reason",
        "fork_source",
        "logprobs",
        "max_draft_tokens",
        "metrics",
        "model_drafts",
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
        "stop_ids",
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
        self.model_drafts = True  # of drafters together, whether that with a model may; lookups may in any case
        self.draft: Draft = NO_DRAFT  # behind the last known token, proposed and not yet verified
        self.fork_source: Sequence | None = None
        self.status = SequenceStatus.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.metrics = RequestMetrics()
        self.logprobs: list[Any] = []  # one entry per output token if params.logprobs asks for them
        self.prompt_logprobs: list[Any] | None = None
        self.sampling_request: Any = None  # built once by the engine; holds output_token_ids by reference
        self.stop_checker: Any = None  # None: somebody else says when the sequence ends
        self.stop_ids: SequenceOf[int] = ()  # tokens that end it, where somebody else says so

    @property
    def max_model_draft_tokens(self) -> int:
        """Of `max_draft_tokens`, those of a model."""
        return self.max_draft_tokens if self.model_drafts else 0

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt's tokens (a copy)."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output. The last one's KV is usually not there yet."""
        return len(self.token_ids)

    @property
    def has_ended(self) -> bool:
        """Whether no step goes on with it: it is finished, or about to be."""
        return self.finish_reason is not None or self.error is not None

    @property
    def is_finished(self) -> bool:
        """Whether the sequence has ended, for whatever reason."""
        return self.status is SequenceStatus.FINISHED

    def fail(self, error: Exception) -> None:
        """Ends with an error of its own, at the end of the step; the first one stands, should that come later."""
        if self.error is not None:
            return
        logger.error("request %r ends:", self.request_id, exc_info=error)
        self.error = f"request {self.request_id!r}: {type(error).__name__}: {error}"

    def append(self, token_id: int) -> None:
        """One more output token."""
        self.token_ids.append(token_id)
        self.output_token_ids.append(token_id)

    def emit(self, token_ids: SequenceOf[int], logprobs: SequenceOf[Any] | None) -> int:
        """Append verified tokens up to and with the one that stops the sequence; how many were emitted."""
        checker = self.stop_checker
        if not self.has_ended and (checker is None or checker.takes(token_ids)):
            self.token_ids += token_ids
            self.output_token_ids += token_ids
            num_emitted = len(token_ids)
        else:
            num_emitted = 0
            while num_emitted < len(token_ids) and not self.has_ended:
                self.append(token_ids[num_emitted])
                if checker is not None:
                    self.finish_reason = checker.append(token_ids[num_emitted])
                num_emitted += 1
            if self.finish_reason is not None:
                self.stop_reason = checker.stop_reason
        if logprobs is not None:
            self.logprobs.extend(logprobs[:num_emitted])
        return num_emitted

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}/{self.child_idx}, {self.status.name}, prompt {self.num_prompt_tokens}, "
            f"output {len(self.output_token_ids)}, context {self.page_table.context_lens})"
        )
