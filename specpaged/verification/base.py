"""What every verifier takes and gives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from specpaged.modeling.forward_output import Argmax, GreedyTokens
from specpaged.sampling.batch import SamplingBatch
from specpaged.sampling.logprobs import TokenLogprobs, token_logprobs
from specpaged.verification.greedy import accept_matching

if TYPE_CHECKING:
    from specpaged.drafting.base import DraftOutput


@dataclass(frozen=True, slots=True)
class VerifyOutput:
    """What each sequence of the batch gains from one step."""

    token_ids: list[list[int]]  # output = accepted + bonus; the accepted alone where failed
    num_accepted: list[int]
    failed: list[bool]  # NaN, or no token allowed, in the row behind the accepted ones
    logprobs: list[list[TokenLogprobs] | None]  # of raw logits, one per output token, where asked for
    rescored: tuple[int, ...] = ()  # sequences whose logits come from a second pass, without their drafts


# Per sequence: output token ids, the number of accepted drafts, and whether the row behind them is not ok.
Matched = tuple[list[list[int]], list[int], list[bool]]


@dataclass(frozen=True, slots=True)
class VerifyRows:
    """The logits of one step, row by row: sequence i has len(draft.token_ids[i]) + 1 rows, in order.

    They are the last rows of its RaggedRow: behind the last known token, and behind each draft token.
    """

    logits: Tensor  # [M, V] fp32, raw
    request_idx: list[int]  # [M]
    num_drafts_seen: list[int]  # [M]

    def processed(self, draft: DraftOutput, sampling: SamplingBatch) -> Tensor:
        """[M, V] fp32"""
        return sampling.process(self.logits, self.request_idx, self.num_drafts_seen, draft.token_ids)


class Verifier(ABC):
    """Decides how many drafts of each sequence stand, and the token that follows them."""

    name: str

    def verify(
        self, logits: Tensor | Argmax | GreedyTokens, draft: DraftOutput, sampling: SamplingBatch
    ) -> VerifyOutput:
        """Verify `logits` [M, V] fp32: len(draft.token_ids[i]) + 1 rows of sequence i, in order.

        Where `sampling.takes_argmax` and nobody wants log-probabilities, their argmax will do: what verifiers differ in
        is how they treat chance. A draft without probabilities (`draft.probs[i]` is None) was certain of its tokens.
        """
        if isinstance(logits, (Argmax, GreedyTokens)):
            matched = accept_matching(draft.token_ids, *logits.on_host())
            return VerifyOutput(*matched, [None] * len(draft.token_ids))
        request_idx, num_drafts_seen = verify_rows(draft.token_ids)
        token_ids, num_accepted, failed = self.match(VerifyRows(logits, request_idx, num_drafts_seen), draft, sampling)
        logprobs = output_logprobs(logits, draft.token_ids, token_ids, sampling)
        return VerifyOutput(token_ids, num_accepted, failed, logprobs)

    @abstractmethod
    def match(self, rows: VerifyRows, draft: DraftOutput, sampling: SamplingBatch) -> Matched:
        """What of each draft stands, and what follows it."""


def verify_rows(drafts: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Per row to verify: which sequence it belongs to, and how many of its drafts precede it.

    Drafts [[5, 6], [], [7]] have the rows  request_idx 0 0 0 1 2 2,  num_drafts_seen 0 1 2 0 0 1.
    """
    request_idx = [i for i, token_ids in enumerate(drafts) for _ in range(len(token_ids) + 1)]
    num_drafts_seen = [j for token_ids in drafts for j in range(len(token_ids) + 1)]
    return request_idx, num_drafts_seen


def output_logprobs(
    logits: Tensor, drafts: Sequence[Sequence[int]], token_ids: Sequence[Sequence[int]], sampling: SamplingBatch
) -> list[list[TokenLogprobs] | None]:
    """Log-probabilities of the output tokens of the sequences that ask for them.

    Raw ones, as vLLM's: before any processing, but for a token mask, which forbids what is then improbable as well.
    """
    result: list[list[TokenLogprobs] | None] = []
    row = 0
    for request, draft, output in zip(sampling.requests, drafts, token_ids, strict=True):
        num_top = request.params.logprobs
        wanted = logits[row : row + len(output)]
        if num_top is not None and request.token_mask is not None:
            wanted = wanted.masked_fill(~request.token_mask[: len(output)].to(wanted.device), float("-inf"))
        result.append(None if num_top is None else token_logprobs(wanted, output, num_top))
        row += len(draft) + 1
    return result
