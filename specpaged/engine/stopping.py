"""When a sequence ends, and the text that it has until then. Ints and strings only, no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from specpaged.sampling_params import SamplingParams

_REPLACEMENT = "\ufffd"  # what a decoder shows for bytes that are no character yet
_MAX_PROMPT_TOKENS = 24


class IncrementalDetokenizer:
    """Text of output tokens, one token at a time, as part of the text that the prompt began.

    A decoder may treat a text's first token otherwise and a token may end inside a character. So a window of tokens is
    decoded: those up to `read` have been emitted, and the window starts far enough before for the decoder to
    see them; the text of the rest is emitted once it ends in a whole character.

        ids      ... a b | c d        emit decode(a b c d) without its first len(decode(a b)) characters,
                     ^   ^            then the window starts at c
                prefix   read
    """

    def __init__(self, tokenizer: Any, params: SamplingParams, prompt_token_ids: Sequence[int] = ()):
        self._decode, added_tokens, special_ids = _backend(tokenizer, params)
        self._skipped_ids = special_ids if params.skip_special_tokens else frozenset()
        # Without spaces between special tokens, one that follows another is emitted as it is written.
        keep_spaces = params.skip_special_tokens or params.spaces_between_special_tokens
        self._added_tokens = {} if keep_spaces else added_tokens
        self._last_was_added = False
        self._ids = self._prompt_suffix(prompt_token_ids)
        self._prefix, self._read = 0, len(self._ids)

    def _prompt_suffix(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The shortest end of the prompt, of a few tokens, that is made of whole characters."""
        ids = [token_id for token_id in prompt_token_ids[-_MAX_PROMPT_TOKENS:] if token_id not in self._skipped_ids]
        for count in range(4, len(ids)):
            if _REPLACEMENT not in self._decode(ids[-count:]):
                return ids[-count:]
        return ids

    def append(self, token_id: int) -> str:
        """The text that the token adds: none while a character is incomplete."""
        if token_id in self._skipped_ids:
            return ""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._prefix : self._read])
        text = self._decode(self._ids[self._prefix :])
        added = self._added_tokens.get(token_id)
        follows_added, self._last_was_added = self._last_was_added, added is not None
        if len(text) <= len(before) or text.endswith(_REPLACEMENT):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return added if added is not None and follows_added else text[len(before) :]


def _backend(
    tokenizer: Any, params: SamplingParams
) -> tuple[Callable[[Sequence[int]], str], dict[int, str], frozenset[int]]:
    """How to decode with a tokenizer, its added tokens, and which of them count as special."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    skip = params.skip_special_tokens
    if backend is not None:
        added = backend.get_added_tokens_decoder()

        def decode(ids: Sequence[int]) -> str:
            return backend.decode(ids, skip_special_tokens=skip)

        special = frozenset(token_id for token_id, token in added.items() if token.special)
        return decode, {token_id: token.content for token_id, token in added.items()}, special

    def decode_slowly(ids: Sequence[int]) -> str:
        return tokenizer.decode(
            list(ids),
            skip_special_tokens=skip,
            clean_up_tokenization_spaces=False,
        )

    added = {token_id: token.content for token_id, token in tokenizer.added_tokens_decoder.items()}
    return decode_slowly, added, frozenset(tokenizer.all_special_ids)


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
        self._stop_ids = {*eos_token_ids, *params.stop_token_ids}
        self._max_tokens = min(params.max_tokens or max_output_tokens, max_output_tokens)
        self._num_tokens = 0
        self._pending: list[int] = []  # tokens that are not in the text yet
        self._text = ""
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

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
