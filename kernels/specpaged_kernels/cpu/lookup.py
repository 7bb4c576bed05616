"""Drafting from a text that grows: see lookup.h."""

from __future__ import annotations

import ctypes
import functools
import weakref
from array import array
from collections.abc import Sequence

from specpaged_kernels.cpu.build import load
from specpaged_kernels.cpu.library import INT, POINTER, SIZE, SOURCE, check_status

_SIGNATURES = {
    "lookup_delete": ([POINTER], None),
    "lookup_num_tokens": ([POINTER], SIZE),
    "lookup_find": ([POINTER, POINTER, SIZE, SIZE, *[POINTER] * 3], INT),
}


@functools.cache
def library_function(name: str, argument_types: tuple[type, ...], result_type: type | None) -> object:
    """Raises BuildError."""
    function = getattr(load(SOURCE), name)
    function.argtypes, function.restype = argument_types, result_type
    return function


def _function(name: str) -> object:
    argument_types, result_type = _SIGNATURES[name]
    return library_function(name, tuple(argument_types), result_type)


class Lookup:
    """The C++ object of the same name: an index of a text, which drafts what may follow."""

    def __init__(self, address: int | None):
        """It takes what lives there. MemoryError where nothing does."""
        if not address:
            raise MemoryError("there is no memory for an index of a text")
        self.address = address  # which lives as long as this object
        self._finalizer = weakref.finalize(self, _function("lookup_delete"), address)

    @property
    def num_tokens(self) -> int:
        """Of the text so far."""
        return _function("lookup_num_tokens")(self.address)

    def append(self, token_ids: Sequence[int]) -> None:
        """The text goes on with these."""
        self.find(token_ids, 0)

    def find(self, new_token_ids: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        """Append these, and look for at most `count` tokens that may follow; with what is known of each of them."""
        new, drafts, evidence = array("q", new_token_ids), array("q", bytes(8 * count)), array("f", bytes(4 * count))
        num_found = ctypes.c_int64()
        status = _function("lookup_find")(
            self.address, new.buffer_info()[0], len(new), count, drafts.buffer_info()[0], evidence.buffer_info()[0],
            ctypes.addressof(num_found),
        )  # fmt: skip
        check_status(status)
        return drafts[: num_found.value].tolist(), evidence[: num_found.value].tolist()
