"""What a request gives back, in vLLM's names and shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from specpaged.metrics import RequestMetrics


class Logprob(NamedTuple):
    """One token's log-probability under the raw logits; rank 1 is the most likely token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One of a request's `n` completions. `finish_reason` is "stop", "length", "abort" or "error"."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    seed: int | None = None  # the seed that reproduces it

    def finished(self) -> bool:
        """Whether this completion has ended."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A request's completions. `error` says why a request failed; its batch mates are not affected."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    error: str | None = None
