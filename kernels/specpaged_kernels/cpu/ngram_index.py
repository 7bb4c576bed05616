"""Prompt lookup over a text that grows: see ngram_index.cpp."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from specpaged_kernels.cpu.library import POINTER, SIZE
from specpaged_kernels.cpu.lookup import Lookup, library_function


class NgramIndex(Lookup):
    """A text, and where each of its n-grams of `shortest` to `longest` tokens, 1 at least, was last followed by any.

    It finds what `ngram_ref` says of the text; of each draft it knows n.

    Raises:
        BuildError: there is no library.
        MemoryError: there is not enough of it.
    """

    def __init__(self, shortest: int, longest: int):
        super().__init__(library_function("ngram_index_new", (SIZE, SIZE), POINTER)(shortest, longest))


def ngram_ref(token_ids: Sequence[int], shortest: int, longest: int, count: int) -> tuple[list[int], int]:
    """`count` tokens that followed the last n of token_ids the last time they stood there, and n; or none, and 0.

    n is the largest in shortest .. longest that occurs before. Where the match reaches up to the end, it goes on with
    what it has found: what repeats, repeats. For n = 2:

        a b c d a b          ->  c d a b c ..
            ^ followed a b
    """
    data = array("q", token_ids)
    width, text = data.itemsize, data.tobytes()
    for n in range(min(longest, len(token_ids) - 1), shortest - 1, -1):
        end = len(text) - width  # something is to follow
        place = text.rfind(text[-n * width :], 0, end)
        while place % width and place >= 0:  # it began within a token
            place = text.rfind(text[-n * width :], 0, place + n * width - 1)
        if place >= 0:
            start = place // width + n
            period = len(token_ids) - start
            return [token_ids[start + i % period] for i in range(count)], n
    return [], 0
