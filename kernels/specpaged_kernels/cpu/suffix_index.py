"""Suffix decoding over texts that grow: see suffix_index.cpp."""

from __future__ import annotations

import ctypes
import math
import weakref
from array import array
from collections import Counter
from collections.abc import Sequence

from specpaged_kernels.cpu.library import INT, POINTER, SIZE, check_status
from specpaged_kernels.cpu.lookup import Lookup, library_function

_DOUBLE = ctypes.c_double


class SuffixTexts:
    """Texts that have ended, of which indexes draft: the newest `most`.

    Raises:
        BuildError: there is no library.
        MemoryError: there is not enough of it.
    """

    def __init__(self, most: int):
        self.most = most
        self.address = library_function("suffix_texts_new", (), POINTER)()
        if not self.address:
            raise MemoryError("there is no memory for an index of texts")
        self._finalizer = weakref.finalize(
            self, library_function("suffix_texts_delete", (POINTER,), None), self.address
        )

    def add(self, token_ids: Sequence[int]) -> None:
        """One more; the oldest goes if they are too many."""
        text = array("q", token_ids)
        add = library_function("suffix_texts_add", (POINTER, POINTER, SIZE, SIZE), INT)
        check_status(add(self.address, text.buffer_info()[0], len(text), self.most))


class SuffixIndex(Lookup):
    """A text, and others: it finds what `suffix_ref` says, and of each draft the logarithm of how likely it is, as far
    as it has been counted: of n places that would be followed by it all but one, n / (n + 1).

    `depth` is the longest suffix that is looked for; behind one of m tokens come at most m * max_factor drafts, as long
    as all of them stand with `min_probability`.

    Raises:
        BuildError: there is no library.
        MemoryError: there is not enough of it.
    """

    def __init__(self, others: SuffixTexts | None, depth: int, max_factor: float, min_probability: float):
        new = library_function("suffix_index_new", (POINTER, SIZE, _DOUBLE, _DOUBLE), POINTER)
        self._others = others  # which is to live as long
        super().__init__(new(others and others.address, depth, max_factor, min_probability))


def suffix_ref(
    texts: Sequence[Sequence[Sequence[int]]], count: int, depth: int, max_factor: float, min_probability: float
) -> tuple[list[int], list[float]]:
    """Drafts behind the end of a text, and the logarithm of what is counted of each.

    texts[0] is that text alone, texts[1] others. For each of both, and each m up to `depth`: of all places behind the
    text's last m tokens, the token is taken that most of them have next, and then of these places the one that most of
    them have next; as long as this has happened to a share of at least `min_probability` of all, and at most `count`
    and m * max_factor times. The best one is taken, whose shares have the largest sum; of equals the first, and the one
    of the longest suffix.
    """
    [known] = texts[0]
    best: tuple[float, list[int], list[float]] = (0.0, [], [])
    for of_kind in texts:
        lengths = {}
        for t, text in enumerate(of_kind):
            for at in range(1, len(text)):
                length = 0
                while length < min(at, len(known), depth) and text[at - length - 1] == known[len(known) - length - 1]:
                    length += 1
                if length:
                    lengths[t, at] = length
        for m in range(min(depth, len(known)), 0, -1):
            places = [place for place in lengths if lengths[place] >= m]
            places.sort(key=lambda place: (-lengths[place], -place[0], -place[1]))
            score, share, drafts, evidence = 0.0, 1.0, [], []
            while places and len(drafts) < min(count, int(m * max_factor)):
                next_ids = [of_kind[t][at + len(drafts)] for t, at in places if at + len(drafts) < len(of_kind[t])]
                if not next_ids:
                    break
                [(token_id, num)] = Counter(next_ids).most_common(1)
                share *= num / len(places)
                if share < min_probability:
                    break
                score += share
                evidence.append(math.log(num / (len(places) + 1)))
                places = [
                    (t, at)
                    for t, at in places
                    if at + len(drafts) < len(of_kind[t]) and of_kind[t][at + len(drafts)] == token_id
                ]
                drafts.append(token_id)
            if score > best[0]:
                best = score, drafts, evidence
    return best[1:]
