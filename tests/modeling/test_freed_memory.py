"""What has been freed is the operating system's again."""

import ctypes
import gc
from pathlib import Path

import pytest

from specpaged import LLM
from specpaged.modeling import freed_memory, pair

NUM_BLOCKS, BLOCK_BYTES = 2000, 40 << 10  # less than what gets pages of its own


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_freed_blocks_below_one_that_is_in_use_are_given_back():
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    gc.collect()
    blocks = [libc.malloc(BLOCK_BYTES) for _ in range(NUM_BLOCKS)]
    in_use = libc.malloc(64)
    for block in blocks:
        ctypes.memset(block, 1, BLOCK_BYTES)
    for block in blocks:
        libc.free(block)
    before = resident_bytes()
    freed_memory.give_back()
    assert resident_bytes() < before - NUM_BLOCKS * BLOCK_BYTES / 2
    libc.free(in_use)


def test_where_there_is_no_call_for_it_nothing_happens(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    freed_memory.give_back()


def test_an_engines_models_are_loaded_and_what_that_has_freed_is_given_back(toy_pair, monkeypatch):
    given = []
    monkeypatch.setattr(pair.freed_memory, "give_back", lambda: given.append(0))
    LLM(toy_pair.target, speculative_config={"model": toy_pair.draft, "num_speculative_tokens": 2}, max_model_len=40)
    assert given
