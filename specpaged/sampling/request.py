"""What sampling knows of one sequence, and of one row of its logits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from specpaged.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specpaged.engine.sequence import Sequence as DecodedSequence


@dataclass(frozen=True)
class SamplingRequest:
    """What sampling reads of one sequence, as values.

    `output_token_ids` are the committed ones and may be the owner's own list; `stop_ids` are eos and stop_token_ids,
    which min_tokens rules out; row j of `token_mask` rules over the row that follows j drafts.
    """

    params: SamplingParams
    seed: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    stop_ids: tuple[int, ...] = ()
    token_mask: Tensor | None = None  # [rows, V] bool, True = allowed
    bad_words_ids: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(
        cls, sequence: DecodedSequence, stop_ids: Iterable[int], bad_words_ids: Iterable[Iterable[int]] = ()
    ) -> SamplingRequest:
        """The request of a sequence, which reads the sequence's own lists of tokens."""
        return cls(
            params=sequence.params,
            seed=sequence.seed,
            prompt_token_ids=sequence.prompt_token_ids,
            output_token_ids=sequence.output_token_ids,
            stop_ids=tuple(sorted(set(stop_ids))),
            bad_words_ids=tuple(map(tuple, bad_words_ids)),
        )

    @property
    def takes_argmax(self) -> bool:
        """Whether each token is its row's most likely one: nothing else is asked of the logits to choose it."""
        return self.params.greedy and not self.needs_processing

    @property
    def needs_processing(self) -> bool:
        """Whether any row of this request can differ from its raw logits."""
        return self._is_processed_throughout or len(self.output_token_ids) < self.params.min_tokens

    @cached_property
    def _is_processed_throughout(self) -> bool:
        params = self.params
        return (
            params.temperature not in (0, 1)
            or self._edits_tokens_throughout
            or params.min_p > 0
            or params.top_k > 0
            or params.top_p < 1
        )

    def edits_tokens(self, num_outputs: int) -> bool:
        """Whether single tokens of a row behind so many outputs are treated otherwise than all others."""
        return self._edits_tokens_throughout or num_outputs < self.params.min_tokens

    @cached_property
    def _edits_tokens_throughout(self) -> bool:
        params = self.params
        return (
            self.token_mask is not None
            or params.allowed_token_ids is not None
            or bool(self.bad_words_ids or params.logit_bias)
            or self.has_penalties
        )

    @property
    def has_penalties(self) -> bool:
        """Whether any of the three penalties is on."""
        params = self.params
        return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0


class Row(NamedTuple):
    """One row of logits: its request, and the drafts of that request that precede the row."""

    request: SamplingRequest
    drafts: Sequence[int]

    @property
    def num_outputs(self) -> int:
        """Output tokens before the one that this row decides: its output index."""
        return len(self.request.output_token_ids) + len(self.drafts)
