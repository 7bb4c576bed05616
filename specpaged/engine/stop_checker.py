"""When a sequence ends, and the text that it has until then. Ints and strings only, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specpaged.engine.detokenizer import IncrementalDetokenizer
from specpaged.sampling_params import SamplingParams


class StopChecker:
    """Told of each output token of one sequence, in order, it says when the sequence ends, and why.

    As in vLLM: an eos token or one of stop_token_ids ends it unless it comes before min_tokens, and is not part of
    the text (but is with include_stop_str_in_output); then max_tokens and `max_output_tokens`, the room that
    max_model_len leaves, end it by length; a stop string that the text of a token after min_tokens completes wins
    over both. Of several stop strings in that text, the one that is complete first counts, and of these the first in
    the list; the text ends before it, or behind it with include_stop_str_in_output.

    `finish_reason` is None, "stop" or "length"; `stop_reason` the stop string or token id, None for the eos token.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: Sequence[int],
        tokenizer: Any | None,
        max_output_tokens: int,
        prompt_token_ids: Sequence[int] = (),
    ):
        self._params = params
        self._tokenizer = tokenizer
        self._prompt_token_ids = prompt_token_ids
        self._detokenizer: IncrementalDetokenizer | None = None
        eos_token_ids = () if params.ignore_eos else tuple(eos_token_ids)
        own_eos = getattr(tokenizer, "eos_token_id", None)
        # vLLM reports no stop_reason for the tokenizer's own eos; other ids of a generation config are stop tokens.
        self._primary_eos = own_eos if own_eos in eos_token_ids else next(iter(eos_token_ids), None)
        self._stop_ids = frozenset({*eos_token_ids, *params.stop_token_ids})
        self.stop_ids = tuple(self._stop_ids)  # the tokens that may end the sequence
        self._max_tokens = min(params.max_tokens or max_output_tokens, max_output_tokens)
        self._num_tokens = 0
        self._pending: list[int] = []  # tokens that are not in the text yet
        self._text = ""
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def takes(self, token_ids: Sequence[int]) -> bool:
        """Whether none of these further output tokens can end the sequence: it has been told of all of them, then.

        Where one may, nothing has happened, and they are to be told one by one.
        """
        num_tokens = self._num_tokens + len(token_ids)
        if num_tokens >= self._max_tokens or self._params.stop or not self._stop_ids.isdisjoint(token_ids):
            return False
        self._num_tokens = num_tokens
        self._pending += token_ids
        return True

    def append(self, token_id: int) -> str | None:
        """One more output token; the finish reason if the sequence ends with it."""
        assert self.finish_reason is None, f"token {token_id} after the end ({self.finish_reason})"
        params = self._params
        self._num_tokens += 1
        if token_id in self._stop_ids and self._num_tokens >= params.min_tokens:
            self.finish_reason = "stop"
            self.stop_reason = None if token_id == self._primary_eos else token_id
        elif self._num_tokens >= self._max_tokens:
            self.finish_reason = "length"
        if self.finish_reason != "stop" or params.include_stop_str_in_output:
            self._pending.append(token_id)
        if params.stop and self._num_tokens > params.min_tokens:
            self._check_stop_strings()
        elif params.stop:
            self._read_pending()
        return self.finish_reason

    @property
    def text(self) -> str:
        """The text so far; while a stop string may yet be completed, without what could belong to it."""
        self._read_pending()
        params = self._params
        if self.finish_reason is None and params.stop and not params.include_stop_str_in_output:
            return self._text[: max(0, len(self._text) - max(map(len, params.stop)) + 1)]
        return self._text

    def _read_pending(self) -> int:
        """Detokenise what is pending, which waits until somebody needs the text; how many characters that adds."""
        if self._tokenizer is None or not self._params.detokenize:
            self._pending.clear()
        if not self._pending:
            return 0
        if self._detokenizer is None:
            self._detokenizer = IncrementalDetokenizer(self._tokenizer, self._params, self._prompt_token_ids)
        new_text = "".join([self._detokenizer.append(token_id) for token_id in self._pending])
        self._pending.clear()
        self._text += new_text
        return len(new_text)

    def _check_stop_strings(self) -> None:
        num_new = self._read_pending()
        if not num_new:
            return
        matches = []
        for order, stop in enumerate(self._params.stop):
            # Only a match that ends in the new characters can be new.
            start = self._text.find(stop, max(0, len(self._text) - num_new - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), order, stop))
        if matches:
            end, _, stop = min(matches)
            self._text = self._text[: end if self._params.include_stop_str_in_output else end - len(stop)]
            self.finish_reason, self.stop_reason = "stop", stop
