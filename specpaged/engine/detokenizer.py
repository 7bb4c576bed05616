"""The text of output tokens, one token at a time. Ints and strings only, no torch."""

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
