"""What an engine knows of tokens. Ints and strings only, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specpaged.engine.stop_checker import StopChecker
from specpaged.sampling_params import SamplingParams, bad_words_token_ids


@dataclass(frozen=True)
class Vocabulary:
    """How many tokens there are, which ones end a text, and how to read them (if it does)."""

    size: int
    eos_token_ids: tuple[int, ...]
    tokenizer: Any | None

    def bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """The token sequences of `params.bad_words`."""
        return bad_words_token_ids(params, self.tokenizer, self.size) if params.bad_words else ()

    def stop_ids(self, params: SamplingParams) -> set[int]:
        """The tokens that may end a text of these params."""
        return {*self.eos_token_ids, *params.stop_token_ids}

    def stop_checker(
        self, params: SamplingParams, prompt_token_ids: Sequence[int], max_output_tokens: int
    ) -> StopChecker:
        """That of one sequence."""
        return StopChecker(params, self.eos_token_ids, self.tokenizer, max_output_tokens, prompt_token_ids)
